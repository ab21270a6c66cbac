#include "chorale/autograd/checkpoint.h"

#include <atomic>
#include <optional>

#include "chorale/autograd/mode.h"
#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/op/builder.h"

namespace chorale {
namespace {

// What one checkpointed call needs to be run again.
struct Frame {
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function;
  std::vector<Tensor> in;
  RandomStream random;
  op::KeptStack stack{op::current_stack()};  // what it ran under, autocast included
  size_t packed = 0;                         // values that forward wanted to save
  std::vector<Tensor> recomputed;
  CheckpointPolicy keeps;
  struct Kept {
    const op::OpDef* op;
    std::vector<Tensor> out;  // without their histories: they would hold this frame
    std::vector<uint32_t> versions;
  };
  std::vector<Kept> kept;  // in the order of the calls
};

// Stands in the place of what runs ops: keeps the results that the policy names, or gives them back.
class Keeper final : public op::Builder {
 public:
  Keeper(op::Builder& runs, Frame& frame, bool is_again)
      : Builder(op::Place::kBottom), runs_(runs), rest_{&runs}, frame_(frame), is_again_(is_again) {}

  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest) override {
    if (op.view || !frame_.keeps(op)) return rest_.all().call(op, in, attrs, out);
    if (is_again_) return give_back(op, out);
    rest_.all().call(op, in, attrs, out);
    Frame::Kept kept{&op, {}, {}};
    for (const Tensor& y : out) {
      kept.out.push_back(y.alias());
      kept.versions.push_back(y.storage() ? y.storage()->version() : 0);
    }
    frame_.kept.push_back(std::move(kept));
  }
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest) override {
    rest_.all().call_into(op, in, attrs, out);
  }
  Tensor draw(Generator& generator, int64_t words, Device device, op::Rest) override {
    return rest_.all().draw(generator, words, device);
  }
  void set_data(const Tensor& x, const Tensor& other, op::Rest) override { rest_.all().set_data(x, other); }
  std::shared_ptr<Builder> keep() override { return runs_.keep(); }
  bool may_reuse_memory() const override { return runs_.may_reuse_memory(); }

 private:
  void give_back(const op::OpDef& op, std::span<Tensor> out) {
    CHORALE_CHECK_STATE(
        next_ < frame_.kept.size() && frame_.kept[next_].op == &op && frame_.kept[next_].out.size() == out.size(),
        "[checkpoint] ", op.name,
        " was not run at this place the first time; the function must do the same both times");
    const Frame::Kept& kept = frame_.kept[next_++];
    for (size_t i = 0; i < out.size(); ++i) {
      CHORALE_CHECK_STATE(!kept.out[i].storage() || kept.out[i].storage()->version() == kept.versions[i],
                          "[checkpoint] a result of ", op.name,
                          " was kept and then overwritten in place; let the policy not keep it");
      out[i] = kept.out[i].alias();
    }
  }

  op::Builder& runs_;
  op::Stack rest_;
  Frame& frame_;
  const bool is_again_;
  size_t next_ = 0;
};

// A stack with a Keeper at its bottom where there is a policy.
class KeeperScope {
 public:
  KeeperScope(const op::Stack& stack, Frame& frame, bool is_again) {
    if (!frame.keeps) return;
    keeper_.emplace(*stack.at(op::Place::kBottom), frame, is_again);
    under_.emplace(stack.with(*keeper_));
  }

 private:
  std::optional<Keeper> keeper_;
  std::optional<op::Under> under_;
};

constinit thread_local uint64_t current_call = 0;

// The outermost call's number while it runs for the first time.
struct NumberedCall {
  NumberedCall() : before(current_call) {
    static std::atomic<uint64_t> calls{0};
    if (before == 0) current_call = ++calls;
  }
  ~NumberedCall() { current_call = before; }
  NumberedCall(const NumberedCall&) = delete;
  NumberedCall& operator=(const NumberedCall&) = delete;
  uint64_t before;
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
    const KeeperScope keeps(frame.stack.stack(), frame, true);
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

uint64_t autograd::checkpointed_call() { return current_call; }

std::vector<Tensor> checkpoint(std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function,
                               const std::vector<Tensor>& in) {
  return checkpoint(std::move(function), in, CheckpointPolicy());
}

std::vector<Tensor> checkpoint(std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function,
                               const std::vector<Tensor>& in, CheckpointPolicy keeps) {
  CHORALE_CHECK(function, "[checkpoint] the function is empty");
  if (!grad_enabled()) return function(in);
  auto frame = std::make_shared<Frame>();
  frame->function = std::move(function);
  frame->in = in;
  frame->keeps = std::move(keeps);
  frame->random = default_generator().state();
  const NumberedCall numbered;
  const KeeperScope keeper(op::current_stack(), *frame, false);
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
