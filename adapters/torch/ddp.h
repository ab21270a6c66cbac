// Data-parallel training for C++ programs on libtorch: every rank has a copy of the module and a part of each batch;
// gradients are averaged over ranks while backward computes them, so that all copies stay equal.
//
//   chorale::comm::World world;
//   world.init();  // the ranks that `chorale run -n 2 ./program` started
//   chorale_torch::DistributedDataParallel ddp(Net(), world.group());
//   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
//   for (…) {
//     optimizer.zero_grad();
//     loss(ddp(x), y).backward();  // gradients are averages when it returns
//     optimizer.step();
//   }
//
// Any torch::nn::Module will do, in its holder or in a std::shared_ptr, with any forward. The wrapper is no module:
// names of parameters are the module's own, and torch::save(ddp.module(), file) writes what a program without us reads.
// Tensors are on the CPU. One thread at a time uses a wrapper.
#pragma once

#include <torch/torch.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chorale/reducer/join.h"
#include "chorale/reducer/reducer.h"

namespace chorale_torch {

using chorale::reducer::FindUnused;
using chorale::reducer::join;
using chorale::reducer::JoinOptions;
using chorale::reducer::Progress;

struct DdpOptions {
  FindUnused find_unused_parameters = FindUnused::kAuto;
  bool gradient_as_bucket_view = true;
  bool static_graph = false;
  // Before a forward, buffers become those of rank 0.
  bool broadcast_buffers = true;
  // At construction, parameters and buffers become those of rank 0.
  bool sync_module_states = true;
  // Buckets of so many MiB; none: 1 for the first, 25 for the others.
  std::optional<double> bucket_cap_mb{};
  // Parameters and buffers, by name, that stay this rank's own: not compared, not sent, not reduced.
  std::vector<std::string> ignore{};
  // Parameters, by name, whose gradients are sparse (those of torch::nn::Embedding with sparse(true) are found).
  std::vector<std::string> sparse{};
  Progress progress = Progress::kAuto;
};

// A bucket of gradients as a hook sees it.
struct GradBucket {
  size_t index;
  bool is_last;
  at::Tensor buffer;  // this rank's gradients, flat, not divided by anything; may be overwritten
  const chorale::comm::Group& group;
};
// Replaces the average over ranks: starts what it needs and returns a function that waits for it and gives the tensor,
// shaped like the bucket, that becomes the gradients.
struct CommHook {
  std::string name;
  std::function<std::function<at::Tensor()>(const GradBucket&)> run;
};

// What the module's type does not matter to.
class DataParallelBase : public chorale::reducer::Joinable, private chorale::reducer::GradientOwner {
 public:
  DataParallelBase(std::shared_ptr<torch::nn::Module> module, const chorale::comm::Group& group, DdpOptions options);
  ~DataParallelBase() override;
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  // Forwards inside the scope are not followed by a reduction: their gradients accumulate on this rank until a backward
  // that belongs to a forward outside.
  class NoSync {
   public:
    explicit NoSync(DataParallelBase& ddp) : ddp_(ddp), before_(std::exchange(ddp.synchronizes_, false)) {}
    ~NoSync() { ddp_.synchronizes_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallelBase& ddp_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }
  // Sets the hook, before the first step; there is at most one.
  void register_comm_hook(CommHook hook);

  // The module's, under its own names.
  std::vector<at::Tensor> parameters() const { return any_module_->parameters(); }
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const { return any_module_->named_parameters(); }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const { return any_module_->named_buffers(); }
  void train(bool on = true) { any_module_->train(on); }
  void eval() { any_module_->eval(); }
  void zero_grad() { any_module_->zero_grad(); }

  const chorale::reducer::Reducer& reducer() const { return *reducer_; }
  const DdpOptions& options() const { return options_; }

  // ---- ranks that run out of inputs: join({&ddp}, {}, [&] { … }) (chorale/reducer/join.h)

  const chorale::comm::Group& join_group() const override { return reducer_->group(); }
  void shadow_step(chorale::reducer::Join& join) override;
  void after_join(int authority) override;

 protected:
  // One forward: constructed before it, told the outputs after it.
  class ForwardScope {
   public:
    explicit ForwardScope(DataParallelBase& ddp);
    // Puts the output behind the node that tells when its backward begins.
    void pass(at::Tensor& output);
    void finish();

   private:
    DataParallelBase& ddp_;
    bool records_, reduced_;
    std::vector<at::Tensor*> outputs_;
  };

 private:
  struct Link;  // how nodes and hooks find this object; empty when it is gone
  struct Outputs;
  struct Managed {
    std::string name;
    at::Tensor tensor;
    bool sparse = false;
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
    chorale::Tensor shown;  // what the reducer made the gradient,
    at::Tensor grad;        // and how PyTorch sees it
  };

  chorale::Tensor gradient(size_t index) override;
  void set_gradient(size_t index, const chorale::Tensor& gradient) override;
  void set_destination(size_t, const chorale::Tensor&) override {}  // PyTorch has no such thing
  void complete(size_t) override {}

  void find_parameters();
  void verify_parameters(const chorale::comm::Group& group) const;
  void add_hooks();
  void begin_backward();
  void broadcast(const torch::OrderedDict<std::string, at::Tensor>& tensors, int root) const;
  void broadcast_states(int root) const;
  int agree_on_live_rank(bool alive) const;
  bool tell_whether_reduced(bool reduced) const;
  bool is_ignored(const std::string& name) const;

  const std::shared_ptr<torch::nn::Module> any_module_;
  const DdpOptions options_;
  std::vector<Managed> managed_;
  std::unique_ptr<chorale::reducer::Reducer> reducer_;
  std::shared_ptr<Link> link_;
  bool synchronizes_ = true;  // not inside no_sync()
  bool buffers_due_ = true;   // the forward before was reduced
};

// Calls `visit` for every tensor in what a forward returns. A type of your own needs an overload beside it.
template <class F>
void visit_tensors(at::Tensor& tensor, const F& visit) {
  if (tensor.defined()) visit(tensor);
}
template <class T, class F>
void visit_tensors(std::vector<T>& values, const F& visit) {
  for (T& value : values) visit_tensors(value, visit);
}
template <class T, size_t N, class F>
void visit_tensors(std::array<T, N>& values, const F& visit) {
  for (T& value : values) visit_tensors(value, visit);
}
template <class T, class F>
void visit_tensors(std::optional<T>& value, const F& visit) {
  if (value) visit_tensors(*value, visit);
}
template <class A, class B, class F>
void visit_tensors(std::pair<A, B>& values, const F& visit) {
  visit_tensors(values.first, visit);
  visit_tensors(values.second, visit);
}
template <class... T, class F>
void visit_tensors(std::tuple<T...>& values, const F& visit) {
  std::apply([&](auto&... value) { (visit_tensors(value, visit), ...); }, values);
}

// Net is a module holder (torch::nn::Sequential, what TORCH_MODULE makes) or a std::shared_ptr to a module.
template <class Net>
class DistributedDataParallel final : public DataParallelBase {
 public:
  DistributedDataParallel(Net net, const chorale::comm::Group& group, const DdpOptions& options = {})
      : DataParallelBase(pointer(net), group, options), net_(std::move(net)) {}
  const Net& module() const { return net_; }

  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward(Args&&... args) {
    ForwardScope scope(*this);
    auto result = net_->forward(std::forward<Args>(args)...);
    visit_tensors(result, [&](at::Tensor& output) { scope.pass(output); });
    scope.finish();
    return result;
  }

 private:
  template <class Impl>
  static std::shared_ptr<torch::nn::Module> pointer(const torch::nn::ModuleHolder<Impl>& holder) {
    return holder.ptr();
  }
  template <class Module>
  static std::shared_ptr<torch::nn::Module> pointer(const std::shared_ptr<Module>& module) {
    return module;
  }

  Net net_;
};

}  // namespace chorale_torch
