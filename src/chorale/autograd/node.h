// The tape. A Node is one recorded call: the op, what its gradient rule reads, and for each input the place where that
// input's gradient goes.
//
// Note [No cycles] A node owns its inputs' nodes and never its own outputs. A saved value is kept as an alias that
// autograd knows nothing of, because the tensor itself may be overwritten in place later and then point to a node that
// leads back here; only leaves that require a gradient, which cannot be overwritten, are kept as they are. Releasing a
// graph is iterative (Note [Iterative release]), so its depth is free.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/base/intrusive.h"
#include "chorale/op/op_def.h"

namespace chorale::op {
class KeptStack;
}

namespace chorale::autograd {

class GradSink;
struct Node;

// Where the gradient of an input goes: to output `index` of a node, or to a leaf; neither: no gradient is needed.
struct Edge {
  base::Intrusive<Node> node;
  uint32_t index = 0;
  Tensor leaf;

  bool wanted() const { return node || leaf.defined(); }
};

// A list of callbacks with handles that remove them; adding and removing from inside a callback is safe. A change makes
// a new list, so that running them, which happens for every gradient of every step, only holds on to the present one.
template <class F>
class HookList {
 public:
  std::function<void()> add(F hook) {
    if (!entries_) entries_ = std::make_shared<Current>();
    auto entry = std::make_shared<F>(std::move(hook));
    auto changed = entries_->list ? std::make_shared<List>(*entries_->list) : std::make_shared<List>();
    changed->push_back(entry);
    entries_->list = std::move(changed);
    return [current = std::weak_ptr(entries_), weak = std::weak_ptr(entry)] {
      const auto entries = current.lock();
      const auto found = weak.lock();
      if (!entries || !found) return;
      auto without = std::make_shared<List>(*entries->list);
      std::erase(*without, found);
      entries->list = std::move(without);
    };
  }
  bool empty() const { return !entries_ || entries_->list->empty(); }
  // Calls f(hook) for those present at the start.
  template <class Call>
  void for_each(Call&& call) const {
    if (empty()) return;
    const std::shared_ptr<const List> present = entries_->list;
    for (const auto& entry : *present) call(*entry);
  }

 private:
  using List = std::vector<std::shared_ptr<F>>;
  struct Current {
    std::shared_ptr<const List> list;
  };
  std::shared_ptr<Current> entries_;  // shared with handles
};

using GradHook = std::function<Tensor(const Tensor& gradient)>;  // an undefined result keeps the gradient
// Gets the sink that the leaf's gradient went to (grad_sink.h).
using LeafHook = std::function<void(const Tensor& leaf, GradSink& sink)>;
using NodePreHook = std::function<void(std::span<Tensor> dout)>;                                // may replace
using NodePostHook = std::function<void(std::span<Tensor> din, std::span<const Tensor> dout)>;  // may replace

struct NodeHooks {
  std::vector<HookList<GradHook>> on_output;      // by output
  std::vector<std::shared_ptr<Tensor>> retained;  // by output: where retain_grad() wants the gradient
  HookList<NodePreHook> before;
  HookList<NodePostHook> after;
};

// A value that a gradient rule will read.
class Saved {
 public:
  Saved() = default;
  // `own_output`: a result of the node itself, kept without its history.
  Saved(const Tensor& value, bool own_output);

  bool defined() const { return value_.defined() || packed_; }
  // The value again; StateError, naming what overwrote it, when its version moved. `node`, `edge` restore its place in
  // the graph for second derivatives.
  Tensor unpack(Node& node, size_t position, const Edge* edge) const;

 private:
  Tensor value_;
  std::shared_ptr<void> packed_;  // instead of the value, where saved-tensor hooks are on
  std::function<Tensor(const std::shared_ptr<void>&)> unpack_hook_;
  uint32_t version_ = 0;
  bool own_output_ = false;
};

// The gradient of something that is no op of the table: a function written by a user, an in-place write into a view.
struct CustomBackward {
  virtual ~CustomBackward() = default;
  virtual const char* name() const = 0;
  // One gradient per edge.
  virtual Tensors apply(Node& node, std::span<const Tensor> dout, op::InputSet needed) = 0;
  // Whether apply() is to be called even if no gradient at all arrived, or if no edge wants one (it goes elsewhere).
  virtual bool always_runs() const { return false; }
  virtual void release() {}
  // A backward through this node was left by an exception, before or after its own turn; not while gradients are only
  // asked for (grad()). Called where it is being handled.
  virtual void note_failure() {}
};

// Made by a NewNode (new_node.h).
struct Node : base::RefCounted {
  const op::OpDef* op = nullptr;  // null when custom
  uint64_t number = 0;            // Lamport clock: greater than those of all inputs' nodes
  SmallVector<Edge, 3> edges;
  SmallVector<Saved, 2> saved_in;  // by input; undefined where the row does not save it
  SmallVector<Saved, 1> saved_out;
  SmallVector<TensorSpec, 1> outputs;
  std::unique_ptr<std::vector<TensorSpec>> inputs;  // where the row saves them
  Attrs attrs;
  std::shared_ptr<const op::KeptStack>
      stack;  // the Builders to run the rule under; null: those that backward runs under
  std::unique_ptr<CustomBackward> custom;
  std::unique_ptr<NodeHooks> hooks;
  bool released = false;

  const char* name() const { return custom ? custom->name() : op->name; }
  NodeHooks& hooks_for_writing();
  // Lets go of saved values; the node cannot run again.
  void release();

  static base::Intrusive<Node> make();
  static void destroy(Node* node);
};

// Note [Views] A view remembers the call that made it, so that an in-place write into a view can be replayed on the
// gradient of its base. The base counts such writes (Slot::rebased); a view whose `seen` is behind makes its node anew.
struct ViewInfo {
  Tensor view_of;  // what it was made from,
  Tensor base;     // and what that was made from in the end: the tensor that is no view
  const op::OpDef* op = nullptr;
  Attrs attrs;
  uint32_t seen = 0;
};

// What few tensors have.
struct SlotExtras {
  Tensor destination;                // where a leaf's next gradient is to be written (a bucket view)
  std::shared_ptr<Tensor> retained;  // gradient of a non-leaf, after retain_grad()
  HookList<GradHook> hooks;          // of a leaf
  HookList<LeafHook> accumulated;    // of a leaf
  HookList<LeafHook> completed;      // of a leaf
  bool completed_by_other = false;   // not by backward: somebody (a reduction over ranks) says when
};

// What autograd keeps in a tensor.
struct Slot final : Tensor::AutogradSlot {
  bool requires_grad = false;  // of a leaf; a tensor with a node always does
  uint32_t index = 0;
  base::Intrusive<Node> node;  // what made it; null for a leaf
  Tensor grad;                 // of a leaf
  uint32_t rebased = 0;        // Note [Views]
  ViewInfo* view = nullptr;
  std::unique_ptr<SlotExtras> extras;

  Slot() = default;
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  ~Slot() override;
  SlotExtras& extras_for_writing() {
    if (!extras) extras = std::make_unique<SlotExtras>();
    return *extras;
  }
  // One comes and goes with every recorded op.
  static void* operator new(size_t bytes);
  static void operator delete(void* memory);
};

inline Slot* slot_of(const Tensor& tensor) { return static_cast<Slot*>(tensor.impl()->autograd.get()); }
Slot& slot_for_writing(const Tensor& tensor);
// False only if there is certainly nothing to record: a view may have gained a history through its base.
inline bool may_want_grad(const Tensor& tensor) {
  if (!tensor.defined()) return false;
  const Slot* slot = slot_of(tensor);
  return slot && (slot->requires_grad || slot->node || slot->view);
}
inline const Tensor& base_of(const Tensor& tensor) {
  const Slot* slot = slot_of(tensor);
  return slot && slot->view ? slot->view->base : tensor;
}

// From now on `tensor` is output `index` of `node`.
inline void set_history(const Tensor& tensor, base::Intrusive<Node> node, uint32_t index) {
  Slot& slot = slot_for_writing(tensor);
  slot.node = std::move(node);
  slot.index = index;
}

// Where the gradient of `tensor` goes now; a view whose base was rebased gets its node made anew first.
Edge edge_of(const Tensor& tensor);

// The next Lamport number above `floor` on this thread.
uint64_t next_number(uint64_t floor);

}  // namespace chorale::autograd
