// Segments: which part of what was traced runs when, and what goes from one part to another.
#include <algorithm>
#include <set>

#include "chorale/api/piece_backward.h"
#include "chorale/api/segment.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/graph/passes/common_values.h"
#include "chorale/graph/passes/recompute.h"
#include "chorale/graph/pieces.h"

namespace chorale::compiled {

using graph::kNone;

std::pair<size_t, size_t> Segment::forward_calls(size_t piece) const {
  return {piece == 0 ? 0 : pieces_[piece - 1].last_call,
          piece + 1 == pieces_.size() ? key_.calls.size() : pieces_[piece].last_call};
}

void Segment::cut() {
  for (Piece& piece : pieces_) {
    if (!piece.exits.empty()) cut_backward(piece);
  }
  cut_forward();
  for (Piece& piece : pieces_) graph::merge_common_values(piece.forward.graph);
  // Two results may be one value, whose memory is given once.
  wanted_places_.assign(wanted_, SIZE_MAX);
  if (pieces_.size() > 1) return;
  const std::vector<uint32_t>& outs = pieces_[0].forward.out;
  for (size_t i = 0; i < outs.size(); ++i) {
    for (size_t o = wanted_; o-- > 0;) {
      if (graph().outputs[live_ + o].value != outs[i]) continue;
      wanted_places_[o] = i;
      break;
    }
  }
}

void Segment::cut_backward(Piece& piece) const {
  std::vector<bool> belongs;
  for (const graph::Node& node : graph().nodes) {
    belongs.push_back(node.origin >= piece.backward_begin && node.origin < piece.backward_end);
  }
  std::vector<uint32_t> results;
  for (const uint32_t value : piece.gradients) {
    if (value != kNone && std::find(results.begin(), results.end(), value) == results.end()) results.push_back(value);
  }
  piece.backward = graph::cut_out(graph(), belongs, results, {}, piece.again);
  graph::merge_common_values(piece.backward.graph);
  piece.reached_by = reached_by(piece);
  piece.saved.clear();
  for (const uint32_t value : piece.backward.in) {
    if (std::find(piece.tangents.begin(), piece.tangents.end(), value) == piece.tangents.end()) {
      piece.saved.push_back(value);
    }
  }
}

void Segment::cut_forward() {
  const graph::Graph& whole = graph();
  std::set<uint32_t> from_outside(whole.inputs.begin(), whole.inputs.end());
  std::set<uint32_t> wanted;  // by later pieces
  for (size_t o = 0; o < live_ + wanted_; ++o) wanted.insert(whole.outputs[o].value);
  for (const Piece& piece : pieces_) wanted.insert(piece.saved.begin(), piece.saved.end());
  std::vector<graph::Output> written;
  for (const graph::Output& output : whole.outputs) {
    if (output.into != kNone) written.push_back(output);
  }
  for (size_t k = pieces_.size(); k-- > 0;) {
    const auto [begin, end] = forward_calls(k);
    std::vector<bool> belongs;
    std::vector<uint32_t> results;
    for (const graph::Node& node : whole.nodes) {
      belongs.push_back(node.origin >= begin && node.origin < end);
      if (!belongs.back()) continue;
      for (const uint32_t y : node.out) {
        if (wanted.count(y)) results.push_back(y);
      }
    }
    const bool is_last = k + 1 == pieces_.size();
    pieces_[k].forward = graph::cut_out(whole, belongs, results, is_last ? written : std::vector<graph::Output>{});
    for (const uint32_t value : pieces_[k].forward.in) {
      if (!from_outside.count(value)) wanted.insert(value);
    }
  }
}

std::vector<bool> Segment::choose_again(size_t piece, double memory_budget) const {
  const graph::Graph& whole = graph();
  const auto [begin, end] = forward_calls(piece);
  const Piece& its = pieces_[piece];
  // The two halves one behind the other; values keep their numbers.
  graph::Graph joint{whole.values, whole.inputs, {}, {}, whole.generators};
  std::vector<size_t> nodes;
  for (size_t n = 0; n < whole.nodes.size(); ++n) {
    if (whole.nodes[n].origin >= begin && whole.nodes[n].origin < end) nodes.push_back(n);
  }
  const auto turn = static_cast<uint32_t>(nodes.size());
  for (size_t n = 0; n < whole.nodes.size(); ++n) {
    if (whole.nodes[n].origin >= its.backward_begin && whole.nodes[n].origin < its.backward_end) nodes.push_back(n);
  }
  for (const size_t n : nodes) joint.nodes.push_back(whole.nodes[n]);
  joint.outputs.assign(whole.outputs.begin(), whole.outputs.begin() + static_cast<int64_t>(live_ + wanted_));
  std::vector<uint32_t> overwritten;
  for (const graph::Output& output : whole.outputs) {
    if (output.into != kNone) overwritten.push_back(whole.inputs[output.into]);
  }
  const std::vector<bool> chosen = graph::choose_again(joint, turn, memory_budget, overwritten);
  std::vector<bool> again(whole.nodes.size(), false);
  for (size_t i = 0; i < turn; ++i) again[nodes[i]] = chosen[i];
  return again;
}

void Segment::log_buckets(const std::string& name) const {
  if (!cap_) return;
  const bool says_more = debug_level() != DebugLevel::kOff;
  const bool has_parameters =
      std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return !piece.bucket.empty(); });
  if (!has_parameters && says_more) log_info(concat("[compile] ", name, ": DDPOptimizer captured no parameters"));
  if (!is_split()) return;
  log_info(concat("[compile] ", name, ": DDPOptimizer cut it at ", pieces_.size(), " buckets, cap ", *cap_, " bytes"));
  for (size_t k = pieces_.size(); k-- > 0;) {
    const Piece& piece = pieces_[k];
    const size_t number = pieces_.size() - 1 - k;  // 0 is the first to be ready
    if (says_more) {
      std::string line = concat("[compile] ", name, ": bucket ", number, ": ", piece.bucket_bytes, " bytes:");
      for (const std::string& parameter : piece.bucket_names) line += " " + parameter;
      log_info(line);
    }
    if (piece.extended > 0) {
      log_warning(concat("[compile] ", name, ": bucket ", number, " took ", piece.extended,
                         " more ops than its cap says, because nothing outside would have read its results"));
    }
  }
}

}  // namespace chorale::compiled
