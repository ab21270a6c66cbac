#include "chorale/graph/functionalize.h"

#include <algorithm>
#include <optional>

#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/prepare.h"
#include "chorale/op/view.h"

namespace chorale::graph {
namespace {

class Functionalizer {
 public:
  explicit Functionalizer(const Recording& recording)
      : recording_(recording), bases_(recording.storages().size()), seen_(recording.tensors().size()) {
    for (uint32_t t = 0; t < recording.tensors().size(); ++t) {
      if (recording.tensors()[t].handle.defined()) bases_[storage_of(t)].handles.push_back(t);
    }
    for (const RecordedCall& call : recording.calls()) {
      if (call.op == &op::kAsStrided && call.in[0] != kNone) bases_[storage_of(call.in[0])].shown_freely = true;
    }
  }

  Functional run(const std::vector<uint32_t>& live, const std::vector<uint32_t>& wanted) {
    for (const RecordedStorage& storage : recording_.storages()) {
      if (storage.is_tangent) read(storage.creator);
    }
    for (at_ = 0; at_ < recording_.calls().size(); ++at_) add(recording_.calls()[at_]);
    for (const uint32_t s : live) {
      const uint32_t whole =
          recording_.storages()[s].creator != kNone ? recording_.storages()[s].creator : bases_[s].handles.front();
      const uint32_t value = read(whole);
      result_.graph.outputs.push_back({value});
      result_.outputs.push_back({s, whole});
    }
    for (const uint32_t t : wanted) {
      result_.graph.outputs.push_back({read(t)});
      result_.outputs.push_back({storage_of(t), t});
    }
    for (uint32_t s = 0; s < bases_.size(); ++s) {
      const RecordedStorage& storage = recording_.storages()[s];
      if (!storage.has_bytes || storage.first_write == kNone) continue;
      if (std::find(live.begin(), live.end(), s) != live.end()) continue;
      result_.graph.outputs.push_back({bases_[s].value, bases_[s].input});
      result_.outputs.push_back({s, kNone});
    }
    remove_dead_nodes(result_.graph);
    return std::move(result_);
  }

 private:
  // Note [Bases]
  struct Base {
    std::vector<uint32_t> handles;  // recorded tensors from outside
    bool shown_freely = false;      // as_strided may reach anywhere in it
    Layout layout;
    uint32_t value = kNone;
    uint32_t input = kNone;
    uint32_t generation = 0;
  };
  struct Seen {
    uint32_t value = kNone;
    uint32_t generation = 0;
  };

  uint32_t storage_of(uint32_t tensor) const { return recording_.tensors()[tensor].storage; }
  const RecordedStorage& storage(uint32_t tensor) const { return recording_.storages()[storage_of(tensor)]; }
  const Layout& layout(uint32_t tensor) const { return recording_.tensors()[tensor].layout; }

  uint32_t new_value(const Layout& layout, Device device) {
    return result_.graph.add_value({layout.sizes, layout.strides, layout.dtype, device});
  }
  uint32_t add_input(uint32_t storage, const Layout& layout, uint32_t tensor) {
    const uint32_t value = new_value(layout, recording_.storages()[storage].device);
    result_.graph.inputs.push_back(value);
    result_.inputs.push_back({storage, layout, tensor});
    return value;
  }

  // The stretch of memory that holds every tensor seen on it, or all of it.
  Layout stretch_of(uint32_t s) const {
    const Base& base = bases_[s];
    const DType dtype = layout(base.handles.front()).dtype;
    int64_t low = 0, high = 0;
    if (base.shown_freely) {
      high = static_cast<int64_t>(recording_.storages()[s].storage->bytes() / size_of(dtype));
    } else {
      low = std::numeric_limits<int64_t>::max();
      for (const uint32_t t : base.handles) {
        const memory::Reach reach = reach_of(layout(t).sizes, layout(t).strides).value_or(memory::Reach{});
        low = std::min(low, layout(t).offset + reach.low);
        high = std::max(high, layout(t).offset + reach.high);
      }
    }
    for (const uint32_t t : base.handles) {
      CHORALE_CHECK_STATE(layout(t).dtype == dtype, "[compile] tensors of ", dtype, " and of ", layout(t).dtype,
                          " look at the same bytes, which are written to; that cannot be traced");
    }
    return {{high - low}, {1}, low, dtype};
  }

  // Makes the base of a storage that was there before anything was recorded.
  void begin(uint32_t s) {
    Base& base = bases_[s];
    const Layout& first = layout(base.handles.front());
    const bool same =
        std::all_of(base.handles.begin(), base.handles.end(), [&](uint32_t t) { return layout(t) == first; });
    const bool is_one = same && !base.shown_freely;
    base.layout = is_one ? first : stretch_of(s);
    base.value = add_input(s, base.layout, is_one ? base.handles.front() : kNone);
    base.input = static_cast<uint32_t>(result_.graph.inputs.size() - 1);
  }

  // The present value of a tensor.
  uint32_t read(uint32_t t) {
    const uint32_t s = storage_of(t);
    const RecordedStorage& storage = recording_.storages()[s];
    Base& base = bases_[s];
    if (base.value == kNone) {
      if (storage.is_tangent) {
        base.layout = layout(storage.creator);
        base.value = add_input(s, base.layout, storage.creator);
      } else if (storage.has_bytes && storage.first_write == kNone && !base.shown_freely) {
        return read_only(t);
      } else {
        CHORALE_INVARIANT(storage.has_bytes, "a tensor is read before anything wrote it");
        begin(s);
      }
    }
    Seen& seen = seen_[t];
    if (seen.value != kNone && seen.generation == base.generation) return seen.value;
    seen.generation = base.generation;
    seen.value = layout(t) == base.layout ? base.value : view_of_base(s, layout(t));
    return seen.value;
  }

  // The value of a tensor whose storage nothing writes to: every different tensor on it is an input.
  uint32_t read_only(uint32_t t) {
    if (seen_[t].value != kNone) return seen_[t].value;
    const uint32_t s = storage_of(t);
    for (const uint32_t other : bases_[s].handles) {
      if (seen_[other].value != kNone && layout(other) == layout(t)) return seen_[t].value = seen_[other].value;
    }
    // A view that a recorded op made is seen where it was made; this is one from outside.
    return seen_[t].value = add_input(s, layout(t), t);
  }

  uint32_t view_of_base(uint32_t s, const Layout& view) {
    const Base& base = bases_[s];
    Node node;
    node.op = &op::kAsStrided;
    node.attrs = op::AsStridedAttrs{view.sizes, view.strides, view.offset - base.layout.offset};
    node.in = {base.value};
    node.out = {new_value(view, recording_.storages()[s].device)};
    return add_node(std::move(node));
  }

  // The storage of `t` shows `value` at its place from now on.
  void write(uint32_t t, uint32_t value) {
    const uint32_t s = storage_of(t);
    Base& base = bases_[s];
    const Layout& place = layout(t);
    if (base.value == kNone) begin(s);
    const Value made = result_.graph.values[value];
    if (made.dtype != place.dtype) {
      Node cast;
      cast.op = &op::kTo;
      cast.attrs = op::CopyAttrs{place.dtype};
      cast.in = {value};
      cast.out = {new_value({made.sizes, contiguous_strides(made.sizes), 0, place.dtype}, made.device)};
      value = add_node(std::move(cast));
    }
    if (!(place == base.layout) || !(result_.graph.values[value].strides == base.layout.strides)) {
      Node write;
      write.kind = Node::Kind::kWrite;
      write.in = {base.value, value};
      write.region = place;
      write.region.offset -= base.layout.offset;
      write.out = {new_value(base.layout, recording_.storages()[s].device)};
      value = add_node(std::move(write));
    }
    base.value = value;
    ++base.generation;
    seen_[t] = {place == base.layout ? value : kNone, base.generation};
  }

  void add(const RecordedCall& call) {
    if (call.kind == RecordedCall::Kind::kDraw) return add_draw(call);
    if (call.op == &op::kDetach && call.kind == RecordedCall::Kind::kCall) return same(call.in[0], call.out[0]);
    Node node;
    node.op = call.op;
    node.attrs = call.attrs;
    for (const uint32_t x : call.in) node.in.push_back(x == kNone ? kNone : read(x));
    if (call.kind == RecordedCall::Kind::kInto) return add_write(call, std::move(node));
    // Inference again: a base may have other strides than the tensor had where it was recorded.
    for (const uint32_t y : call.out) node.out.push_back(new_value(layout(y), storage(y).device));
    for (size_t i = 0; i < call.out.size(); ++i) {
      const uint32_t y = call.out[i];
      Base& base = bases_[storage_of(y)];
      if (storage(y).creator == y) {
        base.layout = layout(y);
        base.value = node.out[i];
      }
      seen_[y] = {node.out[i], base.generation};
    }
    add_node(std::move(node));
  }

  void same(uint32_t x, uint32_t y) {
    const uint32_t value = read(x);
    seen_[y] = {value, bases_[storage_of(y)].generation};
  }

  void add_write(const RecordedCall& call, Node node) {
    const op::OutSpecs specs = [&] {
      node.out.resize(call.out.size());
      return infer(result_.graph, node);
    }();
    for (size_t i = 0; i < call.out.size(); ++i) {
      const op::OutSpec& spec = specs[i];
      const bool own = spec.strided || spec.view_of >= 0;
      node.out[i] =
          new_value({spec.sizes, own ? spec.strides : contiguous_strides(spec.sizes), 0, spec.dtype}, spec.device);
    }
    const std::vector<uint32_t> made = node.out;
    add_node(std::move(node));
    for (size_t i = 0; i < made.size(); ++i) write(call.out[i], made[i]);
  }

  void add_draw(const RecordedCall& call) {
    auto& known = result_.generators;
    const auto at = std::find(known.begin(), known.end(), call.generator);
    Node node;
    node.kind = Node::Kind::kDraw;
    node.generator = static_cast<uint32_t>(at - known.begin());
    if (at == known.end()) known.push_back(call.generator);
    result_.graph.generators = static_cast<uint32_t>(known.size());
    node.words = call.words;
    const uint32_t y = call.out[0];
    node.out = {new_value(layout(y), storage(y).device)};
    bases_[storage_of(y)].layout = layout(y);
    bases_[storage_of(y)].value = node.out[0];
    seen_[y] = {node.out[0], 0};
    add_node(std::move(node));
  }

  uint32_t add_node(Node node, size_t result = 0) {
    node.origin = static_cast<uint32_t>(at_);
    return result_.graph.add(std::move(node)).out[result];
  }

  const Recording& recording_;
  size_t at_ = 0;            // the call that is looked at
  std::vector<Base> bases_;  // by storage
  std::vector<Seen> seen_;   // by tensor
  Functional result_;
};

}  // namespace

Functional functionalize(const Recording& recording, const std::vector<uint32_t>& live,
                         const std::vector<uint32_t>& wanted) {
  return Functionalizer(recording).run(live, wanted);
}

}  // namespace chorale::graph
