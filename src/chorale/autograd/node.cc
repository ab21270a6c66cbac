#include "chorale/autograd/node.h"

#include <algorithm>
#include <utility>

#include "chorale/autograd/mode.h"
#include "chorale/autograd/new_node.h"
#include "chorale/base/error.h"
#include "chorale/base/pool.h"
#include "chorale/op/builder.h"

namespace chorale::autograd {

constinit thread_local Mode mode;

namespace {

// Note [Iterative release] The last reference to a node or to a view's base drops further references, and so on for as
// long as the chain is. Instead of recursing, whatever would be dropped inside a drop waits in the thread's list, which
// the outermost drop empties.
struct ReleaseQueue {
  std::vector<Node*> nodes;
  std::vector<Tensor> tensors;
  bool draining = false;
};
// The queue dies with its thread, but tensors in thread_local storage may die after it: they then make a new one, which
// is leaked.
constinit thread_local ReleaseQueue* release_queue = nullptr;
struct EndOfThread {
  ~EndOfThread() { delete std::exchange(release_queue, nullptr); }
};

ReleaseQueue& queue() {
  if (!release_queue) {
    release_queue = new ReleaseQueue;
    static thread_local EndOfThread end;
  }
  return *release_queue;
}

void drain() {
  ReleaseQueue& pending = queue();
  if (pending.draining) return;
  pending.draining = true;
  while (!pending.nodes.empty() || !pending.tensors.empty()) {
    if (!pending.nodes.empty()) {
      Node* node = pending.nodes.back();
      pending.nodes.pop_back();
      base::Pool<Node>::recycle(node);
    } else {
      const Tensor tensor = std::move(pending.tensors.back());
      pending.tensors.pop_back();
    }
  }
  pending.draining = false;
}

// Makes the node of a view whose base was written through another view: its history is that of the base now.
void renew_view(const Tensor& view, uint32_t rebased) {
  // Iterative: first the views between this one and the nearest one that is up to date, then their nodes from there.
  std::vector<const Tensor*> stale{&view};
  while (true) {
    const Tensor& parent = slot_of(*stale.back())->view->view_of;
    const Slot* parent_slot = slot_of(parent);
    if (!parent_slot || !parent_slot->view || parent_slot->view->seen == rebased) break;
    stale.push_back(&parent);
  }
  for (; !stale.empty(); stale.pop_back()) {
    Slot& at = *slot_of(*stale.back());
    Edge parent = edge_of(at.view->view_of);
    at.view->seen = rebased;
    at.index = 0;
    at.node = {};
    if (!parent.wanted()) continue;
    CHORALE_CHECK_STATE(at.view->op, "a part that was taken of a tensor (", stale.back()->dtype(), " ",
                        stale.back()->sizes(), ") is used after the tensor was overwritten in place: take it again");
    NewNode node;
    node.add_edge(std::move(parent));
    node.set_rule(*at.view->op, at.view->attrs);
    node.add_output(*stale.back());
  }
}

}  // namespace

base::Intrusive<Node> Node::make() { return base::Intrusive<Node>::adopt(base::Pool<Node>::make()); }

void Node::destroy(Node* node) {
  queue().nodes.push_back(node);
  drain();
}

namespace {
// Room for one Slot, so that Pool does not construct what operator new is asked for.
struct SlotRoom {
  alignas(Slot) std::byte bytes[sizeof(Slot)];
  SlotRoom() {}  // NOLINT(modernize-use-equals-default): leaves the bytes alone
};
}  // namespace

void* Slot::operator new(size_t) { return base::Pool<SlotRoom>::make(); }
void Slot::operator delete(void* memory) { base::Pool<SlotRoom>::recycle(static_cast<SlotRoom*>(memory)); }

Slot::~Slot() {
  if (!view) return;
  // A tensor that nobody else holds dies here; a long chain of views must not recurse.
  queue().tensors.push_back(std::move(view->view_of));
  base::Pool<ViewInfo>::recycle(view);
  drain();
}

NodeHooks& Node::hooks_for_writing() {
  if (!hooks) hooks = std::make_unique<NodeHooks>();
  if (hooks->on_output.size() < outputs.size()) {
    hooks->on_output.resize(outputs.size());
    hooks->retained.resize(outputs.size());
  }
  return *hooks;
}

void Node::release() {
  saved_in.clear();
  saved_out.clear();
  if (custom) custom->release();
  released = true;
}

Slot& slot_for_writing(const Tensor& tensor) {
  auto& slot = tensor.impl()->autograd;
  if (!slot) slot = std::make_unique<Slot>();
  return static_cast<Slot&>(*slot);
}

uint64_t next_number(uint64_t floor) {
  static constinit thread_local uint64_t last = 0;
  return last = std::max(last, floor) + 1;
}

Edge edge_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  Slot* slot = slot_of(tensor);
  if (!slot) return {};
  if (slot->view) {
    const Slot* base = slot_of(slot->view->base);
    if (base && slot->view->seen != base->rebased) renew_view(tensor, base->rebased);
  }
  if (slot->node) return {slot->node, slot->index, {}};
  if (slot->requires_grad) return {{}, 0, tensor};
  return {};
}

Saved::Saved(const Tensor& value, bool own_output)
    : version_(value.storage() ? value.storage()->version() : 0), own_output_(own_output) {
  CHORALE_CHECK_STATE(!value.impl()->inference, "[autograd] a tensor of shape ", value.sizes(),
                      " was made in an Inference scope and cannot be saved for backward; clone it outside first");
  if (mode.saved_hooks) {
    const SavedTensorHooks& hooks = *mode.saved_hooks;
    unpack_hook_ = hooks.unpack;
    const NoGrad quiet;
    packed_ = hooks.pack(value.alias());
    return;
  }
  const Slot* slot = slot_of(value);
  const bool is_parameter = slot && slot->requires_grad && !slot->node;
  value_ = is_parameter ? value : value.alias();  // Note [No cycles]
}

Tensor Saved::unpack(Node& node, size_t position, const Edge* edge) const {
  Tensor value;
  if (packed_) {
    value = unpack_hook_(packed_).alias();
  } else {
    value = value_;
    const Storage& storage = *value.storage();
    CHORALE_CHECK_STATE(storage.version() == version_, "[backward of ", node.name(), "] needs its ",
                        own_output_ ? "output " : "input ", position, " (", value.dtype(), " ", value.sizes(),
                        ", version ", version_, "), which was overwritten in place by ",
                        storage.last_writer() ? storage.last_writer() : "a write", " (now version ", storage.version(),
                        "); clone it before the write, or write out of place");
    // The bytes may have been given back since, and come again elsewhere (parameters of fully sharded training).
    if (value.impl()->data) {
      CHORALE_CHECK_STATE(storage.data(), "[backward of ", node.name(), "] needs its ",
                          own_output_ ? "output " : "input ", position, " (", value.dtype(), " ", value.sizes(),
                          "), whose memory was given back: gather the parameters of the fully sharded module first");
      // Backwards of several threads may unpack one parameter: it is written only when it has moved.
      auto* const data = storage.data() + value.offset() * static_cast<int64_t>(value.elem_bytes());
      if (value.impl()->data != data) value.impl()->data = data;
    }
    if (!mode.grad || slot_of(value)) return value;
    value = value.alias();
  }
  if (!mode.grad) return value;
  // Second derivatives: the value must be where it was in the graph.
  if (own_output_) {
    set_history(value, base::Intrusive<Node>::share(&node), static_cast<uint32_t>(position));
  } else if (edge && edge->leaf.defined()) {
    return edge->leaf;
  } else if (edge && edge->node) {
    set_history(value, edge->node, edge->index);
  }
  return value;
}

}  // namespace chorale::autograd
