// An optimizer over parameters that live on several workers. Each owner has an ordinary optimizer over its own ones;
// step() lets all of them take the gradients of a context.
//
//   rpc::DistributedOptimizer<optim::Sgd> optimizer(agent, parameters, {.lr = 0.1});
//   dist_autograd::Context context(agent);
//   context.backward({loss});
//   optimizer.step(context);
//
// The owners serve it: .serves = {…}, and rpc::add(options.serves, rpc::optimizer_functions<optim::Sgd>()).
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/dist_autograd/context.h"
#include "chorale/optim/optimizer.h"
#include "chorale/rpc/agent.h"

namespace chorale::rpc {

namespace detail {
template <class Options>
Options options_of(const optim::OptimizerOf<Options>*);
// Puts the gradients of a context in the place of the parameters' own for the length of its life. One at a time in this
// process: steps of different callers do not mix.
class BorrowedGradients {
 public:
  BorrowedGradients(const std::vector<Tensor>& parameters, dist_autograd::Contexts& contexts, uint64_t context);
  ~BorrowedGradients();
  BorrowedGradients(const BorrowedGradients&) = delete;
  BorrowedGradients& operator=(const BorrowedGradients&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  const std::vector<Tensor>& parameters_;
  std::vector<Tensor> before_;
};
NamedTensors named(const std::vector<RRef<Tensor>>& parameters);
}  // namespace detail

template <class O>
using OptionsOf = decltype(detail::options_of(static_cast<const O*>(nullptr)));

// The optimizer of one owner.
template <class O>
class LocalOptimizer {
 public:
  LocalOptimizer(const std::vector<RRef<Tensor>>& parameters, const OptionsOf<O>& options)
      : optimizer_(std::make_unique<O>(detail::named(parameters), options)), parameters_(optimizer_->parameters()) {}
  // A parameter without a gradient in the context stays as it is.
  void step(uint64_t context) {
    const detail::BorrowedGradients gradients(parameters_, here(), context);
    optimizer_->step();
  }

 private:
  std::unique_ptr<O> optimizer_;
  std::vector<Tensor> parameters_;
};

template <class O>
RRef<LocalOptimizer<O>> make_optimizer(const std::vector<RRef<Tensor>>& parameters, const OptionsOf<O>& options) {
  return here().reference(LocalOptimizer<O>(parameters, options));
}

// What owners of parameters serve.
template <class O>
std::vector<Served> optimizer_functions() {
  return {remote<make_optimizer<O>>, remote<&LocalOptimizer<O>::step>};
}
inline void add(std::vector<Served>& list, const std::vector<Served>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

template <class O>
class DistributedOptimizer {
 public:
  // Makes an optimizer on each owner; throws when one of them could not be made, after all have answered.
  DistributedOptimizer(const Agent& agent, const std::vector<RRef<Tensor>>& parameters,
                       const OptionsOf<O>& options = {})
      : agent_(agent) {
    std::map<int, std::vector<RRef<Tensor>>> by_owner;
    for (const RRef<Tensor>& parameter : parameters) by_owner[parameter.owner().id].push_back(parameter);
    std::vector<Future<RRef<LocalOptimizer<O>>>> made;
    made.reserve(by_owner.size());
    for (const auto& [owner, own] : by_owner)
      made.push_back(agent_.template call_async<make_optimizer<O>>(owner, own, options));
    for (const auto& optimizer : collect_all(made).wait()) optimizers_.push_back(optimizer.wait());
  }

  // One step on every owner, with the context's gradients; throws what one of them threw, after all have answered.
  // RpcError (kUnknownContext), before anything is sent, when the context is not there.
  void step(uint64_t context) {
    static_cast<dist_autograd::Contexts&>(agent_).get(context);
    std::vector<Future<void>> steps;
    for (const auto& optimizer : optimizers_)
      steps.push_back(agent_.template call_async<&LocalOptimizer<O>::step>(optimizer, context));
    for (const auto& step : collect_all(steps).wait()) step.wait();
  }
  void step(const dist_autograd::Context& context) { step(context.id()); }

 private:
  Agent agent_;
  std::vector<RRef<LocalOptimizer<O>>> optimizers_;
};

}  // namespace chorale::rpc
