// Segments: running what was compiled.
#include <algorithm>

#include "chorale/api/piece_backward.h"
#include "chorale/api/segment.h"
#include "chorale/autograd/autograd.h"
#include "chorale/autograd/new_node.h"
#include "chorale/graph/interpret.h"

namespace chorale::compiled {

using autograd::Edge;
using graph::kNone;
using graph::Recording;

void Segment::run_forward(size_t piece, std::span<const Tensor> in, std::span<Tensor> out,
                          std::vector<int64_t>& sizes) const {
  if (!late_) return pieces_[piece].forward_program->run(in, functional_.generators, out);
  const graph::Part& forward = pieces_[piece].forward;
  const graph::SymbolicText& text = late_->texts[piece];
  const auto sizes_from = [&](uint32_t value, const Tensor& made) -> std::optional<graph::Graph> {
    bool told = false;
    for (size_t i = 0; i < late_values_.size(); ++i) {
      // What tells a size is a result of the piece that makes it.
      const auto at = std::find(forward.out.begin(), forward.out.end(), late_values_[i].value);
      if (at == forward.out.end()) continue;
      if (forward.graph.outputs[static_cast<size_t>(at - forward.out.begin())].value != value) continue;
      sizes[late_->symbols[i]] = late_values_[i].dim < 0 ? made.item<int64_t>() : made.size(late_values_[i].dim);
      told = true;
    }
    return told ? std::optional(graph::parse(text.at(sizes))) : std::nullopt;
  };
  graph::interpret(graph::parse(text.at(sizes)), in, functional_.generators, out, sizes_from);
}

void Segment::run_backward(size_t piece, std::span<const Tensor> in, std::span<Tensor> out,
                           std::span<const int64_t> sizes) const {
  if (!late_) return backward_program(piece)->run(in, functional_.generators, out);
  graph::interpret(graph::parse(late_->texts[pieces_.size() + piece].at(sizes)), in, functional_.generators, out);
}

Segment::Results Segment::run(const Bindings& bindings) const {
  const graph::Graph& whole = functional_.graph;
  std::vector<Tensor> values(whole.values.size());
  const auto shown = [](const Tensor& x) {
    return x.is_traced() ? Tensor::on(x.storage(), x.sizes(), x.strides(), x.offset(), x.dtype()) : x;
  };
  for (size_t i = 0; i < whole.inputs.size(); ++i) {
    const graph::Functional::Input& input = functional_.inputs[i];
    Tensor& value = values[whole.inputs[i]];
    if (input.tensor != kNone) {
      const Tensor& from = input_places_[i] != SIZE_MAX ? bindings.outside[input_places_[i]] : own_inputs_[i];
      if (from.defined()) value = shown(from);  // a tangent comes later
      continue;
    }
    for (size_t p = 0; p < key_.outside.size() && !value.defined(); ++p) {
      if (key_.outside[p].storage != input.storage) continue;
      const Tensor& one = bindings.outside[p];
      const int64_t shift = one.offset() - key_.outside[p].layout.offset;
      value = Tensor::on(one.storage(), input.layout.sizes, input.layout.strides, input.layout.offset + shift,
                         input.layout.dtype);
    }
  }
  std::vector<int64_t> sizes = late_ ? late_->sizes : std::vector<int64_t>{};
  for (size_t k = 0; k < pieces_.size(); ++k) {
    const Piece& piece = pieces_[k];
    std::vector<Tensor> in, out(piece.forward.out.size());
    in.reserve(piece.forward.in.size());
    for (const uint32_t value : piece.forward.in) in.push_back(values[value]);
    for (size_t i = 0; i < bindings.free.size(); ++i) {
      if (bindings.free[i].defined() && wanted_places_[i] != SIZE_MAX) out[wanted_places_[i]] = bindings.free[i];
    }
    run_forward(k, in, out, sizes);
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i].defined()) values[piece.forward.out[i]] = out[i];
    }
  }
  Results results;
  results.live.reserve(live_);
  results.wanted.reserve(wanted_);
  for (size_t o = 0; o < live_; ++o) results.live.push_back(values[whole.outputs[o].value]);
  for (size_t o = live_; o < live_ + wanted_; ++o) results.wanted.push_back(values[whole.outputs[o].value]);
  if (key_.tape.empty()) return results;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    const Piece& piece = pieces_[k];
    autograd::NewNode node;
    for (size_t i = 0; i < piece.exits.size(); ++i) {
      const Piece::Exit& exit = piece.exits[i];
      node.add_edge(exit.piece == SIZE_MAX ? bindings.exits[k][i]
                                           : Edge{results.nodes[exit.piece], static_cast<uint32_t>(exit.root), {}});
    }
    auto rule = std::make_unique<PieceBackward>();
    rule->segment = shared_from_this();
    rule->piece = k;
    rule->sizes = sizes;
    for (const uint32_t value : piece.saved) rule->saved.push_back(values[value]);
    results.settle.push_back([kept = node.node(), at = rule.get()] { at->note_versions(); });
    node.set_rule(std::move(rule));
    for (const TensorSpec& spec : piece.outputs) node.describe_output(spec);
    results.nodes.push_back(node.node());
  }
  return results;
}

std::optional<Segment::Direct> Segment::direct() const {
  if (pieces_.size() != 1 || late_ || !key_.tape.empty() || live_ > 0) return {};
  const graph::Part& forward = pieces_[0].forward;
  const graph::Graph& whole = functional_.graph;
  Direct direct{pieces_[0].forward_program, {}, {}};
  for (const uint32_t value : forward.in) {
    const auto i =
        static_cast<size_t>(std::find(whole.inputs.begin(), whole.inputs.end(), value) - whole.inputs.begin());
    if (i == whole.inputs.size() || functional_.inputs[i].tensor == kNone || input_places_[i] == SIZE_MAX) return {};
    direct.inputs.push_back(input_places_[i]);
  }
  for (size_t o = 0; o < wanted_; ++o) {
    const uint32_t value = whole.outputs[live_ + o].value;
    const auto at = static_cast<size_t>(std::find(forward.out.begin(), forward.out.end(), value) - forward.out.begin());
    const bool is_taken = std::find(direct.wanted.begin(), direct.wanted.end(), at) != direct.wanted.end();
    if (at == forward.out.size() || forward.graph.outputs[at].into != kNone || is_taken) return {};
    direct.wanted.push_back(at);
  }
  return direct;
}

bool Segment::lies_in_order(size_t wanted) const {
  if (wanted_places_[wanted] == SIZE_MAX) return false;
  const graph::Value& value = functional_.graph.values[functional_.graph.outputs[live_ + wanted].value];
  return value.strides == contiguous_strides(value.sizes);
}

void Segment::set_history(const Results& results, size_t root, const Tensor& x) const {
  if (results.nodes.empty()) return;
  const auto [piece, index] = root_places_[root];
  autograd::set_history(x, results.nodes[piece], static_cast<uint32_t>(index));
}

Segment::Results Segment::run(const EndOfSegment& end) const {
  const Recording& recording = end.recording;
  Bindings bindings;
  for (const SegmentKey::Outside& outside : key_.outside) {
    bindings.outside.push_back(recording.tensors()[outside.tensor].handle);
  }
  bindings.exits = exits(end);
  Results results = run(bindings);
  for (size_t i = 0; i < end.live.size(); ++i) {
    Storage& storage = *recording.storages()[end.live[i]].storage;
    // A value that backward has saved lies in the storage that the caller sees.
    if (!storage.data()) storage.take_bytes_of(*results.live[i].storage());
    if (results.live[i].elems() > 0) results.live[i].impl()->storage = recording.storages()[end.live[i]].storage;
  }
  for (size_t i = 0; i < end.roots.size(); ++i) set_history(results, i, end.roots[i]);
  for (const auto& settle : results.settle) settle();
  results.settle.clear();
  return results;
}

}  // namespace chorale::compiled
