#include "chorale/nn/hooks.h"

#include <algorithm>
#include <list>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/nn/module.h"

namespace chorale::nn {

// The code that runs hooks runs copies of them: a hook may remove itself or add others.
struct HookLists {
  std::list<ForwardPreHook> before_forward;
  std::list<ForwardHook> after_forward;
  std::list<BackwardPreHook> before_backward;
  std::list<BackwardHook> after_backward;

  std::list<ForwardPreHook>& of(const ForwardPreHook&) { return before_forward; }
  std::list<ForwardHook>& of(const ForwardHook&) { return after_forward; }
  std::list<BackwardPreHook>& of(const BackwardPreHook&) { return before_backward; }
  std::list<BackwardHook>& of(const BackwardHook&) { return after_backward; }
};

Hooks::Hooks(const Hooks& other) : lists_(other.lists_ ? std::make_shared<HookLists>(*other.lists_) : nullptr) {}

template <class Hook>
HookHandle Hooks::add(Hook hook) {
  CHORALE_CHECK(hook, "[Module] a hook is an empty function");
  if (!lists_) lists_ = std::make_shared<HookLists>();
  auto& list = lists_->of(hook);
  const Hook* added = &list.emplace_back(std::move(hook));
  return HookHandle([added, lists = std::weak_ptr(lists_)] {
    if (const auto alive = lists.lock()) {
      alive->of(Hook()).remove_if([added](const Hook& candidate) { return &candidate == added; });
    }
  });
}
template HookHandle Hooks::add(ForwardPreHook);
template HookHandle Hooks::add(ForwardHook);
template HookHandle Hooks::add(BackwardPreHook);
template HookHandle Hooks::add(BackwardHook);

// What the two ends of a call share until its backward is over.
struct HookedCall::Backward {
  std::shared_ptr<HookLists> lists;
  bool inputs_wanted = false;
  std::vector<Tensor> output_gradients;

  void finish(std::vector<Tensor>& input_gradients) {
    for (const BackwardHook& hook : std::list(lists->after_backward)) hook(input_gradients, output_gradients);
    output_gradients.clear();
  }

  // Passes the tensors that ask for gradients through identity function F, and the others as they are.
  template <class F>
  static std::vector<Tensor> pass(std::vector<Tensor> tensors, const std::shared_ptr<Backward>& call) {
    std::vector<size_t> places;
    std::vector<Tensor> wanted;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!requires_grad(tensors[i])) continue;
      places.push_back(i);
      wanted.push_back(tensors[i]);
    }
    if (wanted.empty()) return tensors;
    wanted = apply<F>(wanted, call, places, tensors.size());
    for (size_t k = 0; k < places.size(); ++k) tensors[places[k]] = wanted[k];
    return tensors;
  }

  // The identity, whose backward sees the gradients of all the tensors there are.
  struct Identity : Function {
    Identity(std::shared_ptr<Backward> of, std::vector<size_t> at, size_t total)
        : call(std::move(of)), places(std::move(at)), count(total) {}
    std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return in; }
    std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
      std::vector<Tensor> gradients(count);
      for (size_t k = 0; k < places.size(); ++k) gradients[places[k]] = dout[k];
      run(gradients);
      std::vector<Tensor> din;
      for (const size_t place : places) din.push_back(gradients.at(place));
      return din;
    }
    virtual void run(std::vector<Tensor>& gradients) = 0;

    std::shared_ptr<Backward> call;
    std::vector<size_t> places;
    size_t count;
  };
  struct Inputs final : Identity {
    using Identity::Identity;
    const char* name() const override { return "module_inputs"; }
    void run(std::vector<Tensor>& gradients) override { call->finish(gradients); }
  };
  struct Outputs final : Identity {
    using Identity::Identity;
    const char* name() const override { return "module_outputs"; }
    void run(std::vector<Tensor>& gradients) override {
      for (const BackwardPreHook& hook : std::list(call->lists->before_backward)) hook(gradients);
      call->output_gradients = gradients;
      std::vector<Tensor> none;
      if (!call->inputs_wanted) call->finish(none);
    }
  };
};

HookedCall::HookedCall(Module& module) : module_(module), lists_(module.hooks().lists_) {}
HookedCall::~HookedCall() = default;

namespace {
constinit thread_local const std::vector<std::string>* names_of_inputs = nullptr;

struct NamesScope {
  explicit NamesScope(const std::vector<std::string>& names) : before(std::exchange(names_of_inputs, &names)) {}
  ~NamesScope() { names_of_inputs = before; }
  NamesScope(const NamesScope&) = delete;
  NamesScope& operator=(const NamesScope&) = delete;
  const std::vector<std::string>* before;
};
}  // namespace

const std::vector<std::string>& input_names() {
  CHORALE_CHECK_STATE(names_of_inputs, "[input_names] is asked in a hook that runs before forward; there is none now");
  return *names_of_inputs;
}

std::vector<Tensor> HookedCall::before(std::vector<Tensor> inputs, const std::vector<std::string>& names) {
  {
    const NamesScope scope(names);
    for (const ForwardPreHook& hook : std::list(lists_->before_forward)) hook(module_, inputs);
  }
  inputs_ = inputs;
  if (grad_enabled() && !(lists_->before_backward.empty() && lists_->after_backward.empty())) {
    backward_ = std::make_shared<Backward>();
    backward_->lists = lists_;
    backward_->inputs_wanted = std::any_of(inputs.begin(), inputs.end(), requires_grad);
    inputs = Backward::pass<Backward::Inputs>(std::move(inputs), backward_);
  }
  return inputs;
}

std::vector<Tensor> HookedCall::after(std::vector<Tensor> outputs) {
  for (const ForwardHook& hook : std::list(lists_->after_forward)) hook(module_, inputs_, outputs);
  if (backward_) outputs = Backward::pass<Backward::Outputs>(std::move(outputs), backward_);
  return outputs;
}

}  // namespace chorale::nn
