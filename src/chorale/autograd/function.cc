// Functions whose gradient a user wrote, and activation checkpointing.
#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"

namespace chorale {

using autograd::Edge;
using autograd::Node;
using autograd::Saved;

struct FunctionBackward final : autograd::CustomBackward {
  std::unique_ptr<Function> function;
  struct Kept {
    Saved value;
    int input = -1;   // which input it is, if any
    int output = -1;  // which output
  };
  std::vector<Kept> kept;

  const char* name() const override { return function->name(); }

  Tensors apply(Node& node, std::span<const Tensor> dout, uint32_t needed) override {
    Function& f = *function;
    f.needed_ = needed;
    f.unpacked_.clear();
    for (const Kept& k : kept) {
      const Edge* edge = k.input >= 0 ? &node.edges[static_cast<size_t>(k.input)] : nullptr;
      const int position = k.input >= 0 ? k.input : k.output;
      f.unpacked_.push_back(k.value.defined() ? k.value.unpack(node, static_cast<size_t>(std::max(position, 0)), edge)
                                              : Tensor{});
    }
    std::vector<Tensor> gradients(dout.begin(), dout.end());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) continue;
      const op::Meta& meta = node.outputs[i];
      gradients[i] = zeros(meta.sizes, meta.dtype, meta.device);
    }
    std::vector<Tensor> din = f.backward(gradients);
    f.unpacked_.clear();
    CHORALE_CHECK(din.size() == node.edges.size(), "[", f.name(), "] backward returned ", din.size(), " gradients for ",
                  node.edges.size(), " inputs");
    Tensors result;
    for (size_t i = 0; i < din.size(); ++i) result.push_back(node.edges[i].wanted() ? std::move(din[i]) : Tensor{});
    return result;
  }
  void release() override { kept.clear(); }
};

std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in) {
  std::vector<Tensor> out;
  {
    const NoGrad quiet;
    out = function->forward(in);
  }
  bool wanted = false;
  uint64_t floor = 0;
  auto node = Node::make();
  if (grad_enabled()) {
    for (const Tensor& x : in) {
      Edge edge = x.defined() && is_differentiable(x.dtype()) ? autograd::edge_of(x) : Edge{};
      wanted |= edge.wanted();
      if (edge.node) floor = std::max(floor, edge.node->number);
      node->edges.push_back(std::move(edge));
    }
  }
  if (!wanted) return out;
  node->number = autograd::next_number(floor);
  auto backward = std::make_unique<FunctionBackward>();
  const auto position = [](const std::vector<Tensor>& list, const Tensor& x) {
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const Tensor& t) { return t.defined() && x.defined() && t.is(x); });
    return found == list.end() ? -1 : static_cast<int>(found - list.begin());
  };
  for (const Tensor& x : function->to_save_) {
    FunctionBackward::Kept kept{.value = {}, .input = position(in, x), .output = position(out, x)};
    if (x.defined()) kept.value = Saved(x, kept.input < 0 && kept.output >= 0);
    backward->kept.push_back(std::move(kept));
  }
  function->to_save_.clear();
  const std::vector<Tensor> plain = std::exchange(function->non_differentiable_, {});
  for (size_t i = 0; i < out.size(); ++i) {
    node->outputs.push_back({out[i].sizes(), out[i].dtype(), out[i].device()});
    if (position(plain, out[i]) >= 0 || !is_differentiable(out[i].dtype())) continue;
    // An input returned as it is must not take this node's history.
    if (position(in, out[i]) >= 0) out[i] = out[i].alias();
    autograd::Slot& slot = autograd::slot_for_writing(out[i]);
    slot.node = node;
    slot.index = static_cast<uint32_t>(i);
  }
  backward->function = std::move(function);
  node->custom = std::move(backward);
  return out;
}

namespace {

// What one checkpointed call needs to be run again.
struct Frame {
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function;
  std::vector<Tensor> in;
  RandomStream random;
  op::KeptStack stack{op::current_stack()};  // what it ran under, autocast included
  size_t packed = 0;                         // values that forward wanted to save
  std::vector<Tensor> recomputed;
};
struct Ticket {
  std::shared_ptr<Frame> frame;
  size_t number;
};

void recompute(Frame& frame) {
  const RandomStream now = default_generator().state();
  default_generator().restore(frame.random);
  struct Restore {
    RandomStream state;
    ~Restore() { default_generator().restore(state); }
  } const restore{now};
  std::vector<Tensor> values;
  {
    const EnableGrad record;
    const op::Under same(frame.stack.stack());
    const SavedTensorHooksScope collect({[&](const Tensor& value) {
                                           values.push_back(value);
                                           return std::make_shared<int>(0);
                                         },
                                         [](const std::shared_ptr<void>&) -> Tensor {
                                           throw StateError(
                                               "[checkpoint] a gradient was asked for inside the recomputation");
                                         }});
    frame.function(frame.in);
  }
  CHORALE_CHECK_STATE(values.size() == frame.packed, "[checkpoint] the function saved ", frame.packed,
                      " values the first time and ", values.size(),
                      " when it was run again; it must do the same both times");
  frame.recomputed = std::move(values);
}

}  // namespace

std::vector<Tensor> checkpoint(std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function,
                               const std::vector<Tensor>& in) {
  if (!grad_enabled()) return function(in);
  auto frame = std::make_shared<Frame>();
  frame->function = std::move(function);
  frame->in = in;
  frame->random = default_generator().state();
  const SavedTensorHooksScope forget({[frame](const Tensor&) {
                                        return std::make_shared<Ticket>(Ticket{frame, frame->packed++});
                                      },
                                      [](const std::shared_ptr<void>& packed) {
                                        const auto& ticket = *std::static_pointer_cast<Ticket>(packed);
                                        if (ticket.frame->recomputed.empty()) recompute(*ticket.frame);
                                        return ticket.frame->recomputed[ticket.number];
                                      }});
  return frame->function(in);
}

}  // namespace chorale
