#include "chorale/api/segment.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "chorale/api/piece_backward.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/graph/passes/recompute.h"
#include "chorale/op/group_tensor.h"

namespace chorale::compiled {
namespace {

using autograd::Edge;
using graph::kNone;
using graph::RecordedCall;
using graph::RecordedTensor;
using graph::Recording;

std::vector<std::vector<size_t>> shape_of(const TapeCut& cut) {
  std::vector<std::vector<size_t>> shape;
  for (const TapePiece& piece : cut.pieces) {
    shape.push_back({piece.roots.size()});
    for (const TapePiece::Exit& exit : piece.exits) {
      shape.back().push_back(exit.piece);
      shape.back().push_back(exit.root);
      shape.back().push_back(exit.edge.node ? 1 : 0);
    }
  }
  return shape;
}

std::vector<Edge> edges_of(const std::vector<Tensor>& roots) {
  std::vector<Edge> edges;
  edges.reserve(roots.size());
  for (const Tensor& root : roots) edges.push_back(autograd::edge_of(root));
  return edges;
}

bool same_call(const RecordedCall& a, const RecordedCall& b) {
  return a.kind == b.kind && a.op == b.op && a.words == b.words && a.generator == b.generator && a.in == b.in &&
         a.out == b.out && a.attrs == b.attrs && a.region == b.region;
}

std::string name_of(const RecordedCall& call) {
  return call.kind == RecordedCall::Kind::kDraw ? "draw" : call.op->name;
}

std::string text_of(const graph::Layout& layout) { return concat(layout.dtype, layout.sizes); }

// Pieces of the forward pass: one, or the splitter's.
std::vector<graph::Bucket> buckets_of(const Recording& recording, const EndOfSegment& end, bool split,
                                      std::vector<Tensor>& parameters) {
  const std::vector<RecordedCall>& calls = recording.calls();
  const graph::ActiveDdp* module = split ? graph::active_ddp() : nullptr;
  if (!module) {
    std::vector<graph::Bucket> all(1);
    all[0].end = calls.size();
    return all;
  }
  std::map<uint32_t, uint32_t> number_of;  // recorded tensor -> parameter
  std::vector<int64_t> bytes;
  for (uint32_t t = 0; t < recording.tensors().size(); ++t) {
    const Tensor& handle = recording.tensors()[t].handle;
    if (!handle.defined() || !requires_grad(handle) || !is_leaf(handle)) continue;
    if (module->is_ignored && module->is_ignored(handle)) continue;
    number_of[t] = static_cast<uint32_t>(parameters.size());
    parameters.push_back(handle);
    bytes.push_back(static_cast<int64_t>(handle.storage()->bytes()));
  }
  std::vector<graph::CallToSplit> to_split;
  for (const RecordedCall& call : calls) {
    graph::CallToSplit at;
    for (const uint32_t x : call.in) {
      if (x == kNone) continue;
      at.in.push_back(x);
      const auto found = number_of.find(x);
      if (found == number_of.end()) continue;
      if (std::find(at.parameters.begin(), at.parameters.end(), found->second) == at.parameters.end()) {
        at.parameters.push_back(found->second);
      }
    }
    at.out.assign(call.out.begin(), call.out.end());
    at.region = call.region;
    to_split.push_back(std::move(at));
  }
  const std::set<uint32_t> live(end.live.begin(), end.live.end()), wanted(end.wanted.begin(), end.wanted.end());
  return graph::split_calls(
      to_split, bytes,
      [&](uint32_t t) { return live.count(recording.tensors()[t].storage) > 0 || wanted.count(t) > 0; }, module->cap,
      std::min(graph::kFirstBucketBytes, module->cap));
}

// Whether a graph is a training step: it updates parameters, or computes gradients by rows that do nothing else.
bool has_backward(const graph::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const graph::Node& node) {
    return node.kind == graph::Node::Kind::kRow &&
           (node.op->lists || std::string_view(node.op->name).ends_with("_backward"));
  });
}

std::vector<uint64_t> ends_of(const std::vector<RecordedCall>& calls, const std::vector<graph::Bucket>& buckets) {
  std::vector<uint64_t> ends;
  ends.reserve(buckets.size());
  for (const graph::Bucket& bucket : buckets) ends.push_back(bucket.end == 0 ? 0 : calls[bucket.end - 1].time);
  ends.back() = ~uint64_t{0};
  return ends;
}

std::vector<uint64_t> ends_of(const std::vector<RecordedCall>& calls, const std::vector<Segment::Piece>& pieces) {
  std::vector<graph::Bucket> buckets;
  for (const Segment::Piece& piece : pieces) {
    buckets.emplace_back();
    buckets.back().end = piece.last_call;
  }
  return ends_of(calls, buckets);
}

}  // namespace

std::vector<SegmentKey::Outside> Segment::outside_of(const Recording& recording) {
  std::vector<SegmentKey::Outside> found;
  std::vector<uint32_t> on_storage(recording.storages().size(), 0);
  for (const RecordedTensor& tensor : recording.tensors())
    on_storage[tensor.storage] += tensor.handle.defined() ? 1 : 0;
  for (uint32_t t = 0; t < recording.tensors().size(); ++t) {
    const RecordedTensor& tensor = recording.tensors()[t];
    if (!tensor.handle.defined()) continue;
    found.push_back({t, tensor.storage, tensor.layout, requires_grad(tensor.handle), on_storage[tensor.storage] > 1,
                     recording.managed(*recording.storages()[tensor.storage].storage) != nullptr});
  }
  return found;
}

std::shared_ptr<Segment> Segment::build(Recording& recording, const EndOfSegment& end, const BuildOptions& options) {
  auto made = std::make_shared<Segment>();
  SegmentKey& key = made->key_;
  key.calls = recording.calls();
  key.outside = outside_of(recording);
  key.live = end.live;
  key.layouts = end.layouts;
  for (const Tensor& root : end.roots) key.roots.push_back(recording.find(part_of(root)));

  std::vector<Tensor> parameters;
  // Of what goes from piece to piece nobody could say how its gradient is placed.
  const bool split = options.split && end.layouts.empty();
  const std::vector<graph::Bucket> buckets = buckets_of(recording, end, split, parameters);
  made->pieces_.resize(buckets.size());
  if (split && graph::active_ddp()) made->cap_ = graph::active_ddp()->cap;
  for (size_t k = 0; k < buckets.size(); ++k) {
    Piece& piece = made->pieces_[k];
    piece.last_call = buckets[k].end;
    piece.bucket_bytes = buckets[k].bytes;
    piece.extended = buckets[k].extended;
    for (const uint32_t p : buckets[k].parameters) {
      piece.bucket.push_back(parameters[p]);
      const bool has_name = graph::active_ddp()->name_of != nullptr;
      piece.bucket_names.push_back(has_name ? graph::active_ddp()->name_of(parameters[p]) : "a parameter");
    }
  }

  std::vector<Tensor> gradients;  // kept until their values are known
  std::vector<std::vector<uint32_t>> gradient_of(buckets.size());
  std::vector<std::vector<uint32_t>> tangent_of(buckets.size());
  if (options.joint && !end.roots.empty()) {
    const TapeCut cut = cut_tape(edges_of(end.roots), end.begin, ends_of(recording.calls(), buckets));
    CHORALE_CHECK_STATE(!cut.has_hooks, "[compile] hooks look at gradients inside of the graph");
    key.tape = shape_of(cut);
    made->root_places_ = cut.place;
    for (size_t k = buckets.size(); k-- > 0;) {
      const TapePiece& piece = cut.pieces[k];
      Piece& its = made->pieces_[k];
      its.backward_begin = recording.calls().size();
      const ShutPiece shut(piece);
      its.tangent_wholes.resize(piece.roots.size());
      for (size_t i = 0; i < end.roots.size(); ++i) {
        const std::optional<Whole> root = whole_of(end.roots[i]);
        if (root && cut.place[i].first == k) its.tangent_wholes[cut.place[i].second] = gradient_like(*root);
      }
      autograd::BackwardRun run({.retain_graph = true});
      for (size_t i = 0; i < piece.exits.size(); ++i) {
        run.capture(shut.leaf(i));
        its.exits.push_back({piece.exits[i].piece, piece.exits[i].root});
      }
      for (size_t i = 0; i < piece.roots.size(); ++i) {
        const Edge& root = piece.roots[i];
        const TensorSpec& spec = root.node->outputs[root.index];
        const std::optional<Whole>& whole = its.tangent_wholes[i];
        its.outputs.push_back(spec);
        const Shape sizes = whole ? whole->part_sizes() : spec.sizes;
        const Tensor tangent = recording.placeholder({sizes, contiguous_strides(sizes), 0, spec.dtype}, spec.device);
        tangent_of[k].push_back(recording.find(tangent));
        if (!piece.exits.empty()) run.add_root(root, whole ? whole->around(tangent) : tangent);
      }
      if (!piece.exits.empty() && !piece.roots.empty()) run.run();
      for (size_t i = 0; i < piece.exits.size(); ++i) {
        const Tensor gradient = run.captured(i);
        its.gradient_wholes.push_back(whole_of(gradient));
        gradient_of[k].push_back(gradient.defined() ? recording.add(part_of(gradient)) : kNone);
        gradients.push_back(gradient);
      }
      its.backward_end = recording.calls().size();
    }
  }

  std::vector<uint32_t> wanted = end.wanted;
  for (const auto& list : gradient_of) {
    for (const uint32_t gradient : list) {
      if (gradient != kNone) wanted.push_back(gradient);
    }
  }
  made->functional_ = graph::functionalize(recording, end.live, wanted);
  made->live_ = end.live.size();
  made->wanted_ = end.wanted.size();
  const graph::Graph& whole = made->functional_.graph;
  size_t at = made->live_ + made->wanted_;
  const std::vector<graph::LateSize>& late = recording.late_sizes();
  for (size_t i = 0; i < late.size(); ++i) {
    made->late_values_.push_back({whole.outputs[at - late.size() + i].value, late[i].dim});
  }
  for (size_t k = 0; k < buckets.size(); ++k) {
    for (const uint32_t gradient : gradient_of[k]) {
      made->pieces_[k].gradients.push_back(gradient == kNone ? kNone : whole.outputs[at++].value);
    }
    for (const uint32_t tangent : tangent_of[k]) {
      for (size_t i = 0; i < whole.inputs.size(); ++i) {
        if (made->functional_.inputs[i].tensor == tangent) made->pieces_[k].tangents.push_back(whole.inputs[i]);
      }
    }
  }
  made->cut();
  for (const Piece& piece : made->pieces_) made->texts_.push_back(graph::print(piece.forward.graph));
  for (const Piece& piece : made->pieces_) made->texts_.push_back(graph::print(piece.backward.graph));
  if (late.empty()) {
    bool any = false;
    for (size_t k = 0; k < buckets.size(); ++k) {
      Piece& piece = made->pieces_[k];
      if (piece.exits.empty()) continue;
      piece.again = made->choose_again(k, options.memory_budget);
      any |= std::find(piece.again.begin(), piece.again.end(), true) != piece.again.end();
    }
    if (any) made->cut();
    for (Piece& piece : made->pieces_) {
      // A step, which has its backward inside.
      if (piece.exits.empty() && has_backward(piece.forward.graph)) {
        graph::recompute(piece.forward.graph, options.memory_budget);
      }
    }
  }
  made->backward_programs_.resize(buckets.size());
  for (graph::RecordedCall& call : key.calls) call.time = 0;
  made->place_inputs(recording, tangent_of);
  return made;
}

void Segment::place_inputs(const Recording& recording, const std::vector<std::vector<uint32_t>>& tangent_of) {
  const auto is_tangent = [&](uint32_t tensor) {
    return std::any_of(tangent_of.begin(), tangent_of.end(), [&](const std::vector<uint32_t>& all) {
      return std::find(all.begin(), all.end(), tensor) != all.end();
    });
  };
  const auto is_read = [&](uint32_t value) {
    return std::any_of(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
      return std::find(piece.saved.begin(), piece.saved.end(), value) != piece.saved.end() ||
             std::find(piece.forward.in.begin(), piece.forward.in.end(), value) != piece.forward.in.end();
    });
  };
  own_inputs_.resize(functional_.inputs.size());
  for (size_t i = 0; i < functional_.inputs.size(); ++i) {
    const uint32_t tensor = functional_.inputs[i].tensor;
    const auto found = std::find_if(key_.outside.begin(), key_.outside.end(),
                                    [&](const SegmentKey::Outside& one) { return one.tensor == tensor; });
    const bool is_outside = found != key_.outside.end();
    input_places_.push_back(is_outside ? static_cast<size_t>(found - key_.outside.begin()) : SIZE_MAX);
    if (is_outside || tensor == kNone || is_tangent(tensor) || !is_read(functional_.graph.inputs[i])) continue;
    // A gradient may talk to a group that the forward pass did not; the layouts of the key say which one that is.
    const Tensor& handle = recording.tensors()[tensor].handle;
    CHORALE_CHECK_STATE(recording.is_constant(*handle.storage()), "[compile] a gradient reads a tensor (",
                        handle.dtype(), " ", handle.sizes(),
                        ") that the forward pass does not: let the forward pass save it, or compile without "
                        "whole_graph");
    own_inputs_[i] = handle;
  }
}

void Segment::compile(const Backend& backend, size_t stretch) {
  backend_ = backend;
  stretch_ = stretch;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    pieces_[k].forward_program = backend_(pieces_[k].forward.graph, {false, k, pieces_.size(), stretch});
  }
}

void Segment::release() const {
  for (const Piece& piece : pieces_) {
    if (piece.forward_program) piece.forward_program->release();
  }
}

void Segment::resize(std::shared_ptr<const Segment> like) {
  like_ = std::move(like);
  // The same values are kept at all sizes, so that the kernels are the same.
  const std::vector<graph::Node>&nodes = graph().nodes, &others = like_->graph().nodes;
  const bool is_alike = std::equal(nodes.begin(), nodes.end(), others.begin(), others.end(),
                                   [](const graph::Node& a, const graph::Node& b) {
                                     return a.kind == b.kind && a.op == b.op && a.in == b.in && a.out == b.out;
                                   });
  bool differs = false;
  for (size_t k = 0; k < pieces_.size() && is_alike; ++k) {
    differs |= pieces_[k].again != like_->pieces_[k].again;
    pieces_[k].again = like_->pieces_[k].again;
  }
  if (differs) cut();
  for (size_t k = 0; k < pieces_.size(); ++k) {
    pieces_[k].forward_program = like_->pieces_[k].forward_program;
    if (texts_ != like_->texts_) {
      pieces_[k].forward_program = pieces_[k].forward_program->at_other_sizes(pieces_[k].forward.graph);
    }
  }
}

std::string Segment::text() const {
  std::string all;
  for (size_t k = 0; k < pieces_.size(); ++k) all += texts_[k];
  return all;
}

std::shared_ptr<const graph::Program> Segment::backward_program(size_t piece) const {
  const std::lock_guard lock(mutex_);
  auto& program = backward_programs_[piece];
  const graph::Graph& backward = pieces_[piece].backward.graph;
  if (!program && like_) {
    program = like_->backward_program(piece);
    if (texts_ != like_->texts_) program = program->at_other_sizes(backward);
  }
  if (!program) program = backend_(backward, {true, piece, pieces_.size(), stretch_});
  return program;
}

std::string Segment::mismatch(const EndOfSegment& end, const std::vector<SegmentKey::Outside>& outside) const {
  const Recording& recording = end.recording;
  for (size_t i = 0; i < std::min(outside.size(), key_.outside.size()); ++i) {
    const SegmentKey::Outside &now = outside[i], &then = key_.outside[i];
    if (now.layout.dtype != then.layout.dtype || !(now.layout.sizes == then.layout.sizes)) {
      return concat("input ", i, " is ", text_of(now.layout), ", expected ", text_of(then.layout));
    }
    const bool is_managed = now.is_managed && then.is_managed;
    if (!is_managed && !(now.layout.strides == then.layout.strides)) {
      return concat("input ", i, " has strides ", now.layout.strides, ", expected ", then.layout.strides);
    }
    if (!is_managed && now.wants_grad != then.wants_grad) {
      return concat("input ", i, then.wants_grad ? " does not require a gradient" : " requires a gradient");
    }
    if (now.tensor != then.tensor || now.storage != then.storage || now.compare_offset != then.compare_offset ||
        (now.compare_offset && now.layout.offset != then.layout.offset)) {
      return concat("input ", i, " shares its memory with other tensors than before");
    }
  }
  if (outside.size() != key_.outside.size()) {
    return concat(outside.size(), " tensors from outside, expected ", key_.outside.size());
  }
  const std::vector<RecordedCall>& calls = recording.calls();
  for (size_t i = 0; i < std::min(calls.size(), key_.calls.size()); ++i) {
    if (!same_call(calls[i], key_.calls[i])) {
      return concat("call ", i, " is ", name_of(calls[i]), ", expected ", name_of(key_.calls[i]),
                    calls[i].op == key_.calls[i].op ? " with other operands or attributes" : "");
    }
  }
  if (!same_layouts(end.layouts, key_.layouts)) return "sharded tensors are placed otherwise";
  if (calls.size() != key_.calls.size()) return concat(calls.size(), " calls, expected ", key_.calls.size());
  if (end.live != key_.live) return "other results are wanted";
  std::vector<uint32_t> roots;
  for (const Tensor& root : end.roots) roots.push_back(recording.find(part_of(root)));
  if (roots != key_.roots) return "gradients come to other results";
  if (!key_.tape.empty()) {
    const TapeCut cut = cut_tape(edges_of(end.roots), end.begin, ends_of(calls, pieces_));
    if (cut.has_hooks || shape_of(cut) != key_.tape) return "gradients go to other tensors";
  }
  return {};
}

std::vector<std::vector<Edge>> Segment::exits(const EndOfSegment& end) const {
  std::vector<std::vector<Edge>> all;
  if (key_.tape.empty()) return all;
  const std::vector<RecordedCall>& calls = end.recording.calls();
  const std::vector<RecordedCall> forward(calls.begin(), calls.begin() + static_cast<int64_t>(key_.calls.size()));
  for (const TapePiece& piece : cut_tape(edges_of(end.roots), end.begin, ends_of(forward, pieces_)).pieces) {
    all.emplace_back();
    for (const TapePiece::Exit& exit : piece.exits) all.back().push_back(exit.piece == SIZE_MAX ? exit.edge : Edge{});
  }
  return all;
}

}  // namespace chorale::compiled
