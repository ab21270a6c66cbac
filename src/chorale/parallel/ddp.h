// Data-parallel training: every rank has a copy of the module and a part of each batch; gradients are averaged over
// ranks while backward computes them, so that all copies stay equal.
//
//   parallel::DistributedDataParallel ddp(Net(), group);
//   optim::AdamW optimizer(ddp.named_parameters(), {.lr = 1e-3});
//   for (…) {
//     optimizer.zero_grad();
//     backward(loss(ddp(x), y));  // gradients are averages when it returns
//     optimizer.step();
//   }
//
// Any module and any forward will do; tensors are found in its results as visit_tensors finds them.
//
// Note [Exceptions]
// A rank that throws in forward, in backward or in a hook leaves the others waiting for its gradients. When the
// exception ends it, or it leaves the group, they get a CommError with that exception's text. A program that
// catches it on all ranks goes on with set_group().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "chorale/autograd/new_node.h"
#include "chorale/comm/mesh.h"
#include "chorale/graph/host_value.h"
#include "chorale/nn/module.h"
#include "chorale/parallel/ddp_log.h"
#include "chorale/parallel/localized.h"
#include "chorale/parallel/mixed_precision.h"
#include "chorale/parallel/verify.h"
#include "chorale/reducer/join.h"
#include "chorale/reducer/reducer.h"
#include "chorale/trace/trace.h"

namespace chorale::parallel {

using reducer::CommHook;
using reducer::FindUnused;
using reducer::GradBucket;
using reducer::Join;
using reducer::join;
using reducer::Joinable;
using reducer::JoinOptions;
using reducer::Progress;

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
  // Parameters and buffers, by name, that stay this rank's own: not compared, not sent, not reduced, not cast.
  std::vector<std::string> ignore{};
  std::optional<MixedPrecision> mixed_precision{};
  // Which thread moves reductions while backward computes.
  Progress progress = Progress::kAuto;
  // Instead of a group: replicas along the one dimension of a mesh, mesh["dp"].
  std::optional<comm::Mesh> mesh{};
};

// Takes care of the buffers instead of the broadcast. What it returns is waited for at the end of backward.
struct BufferHook {
  enum class Place : uint8_t { kBeforeForward, kAfterForward };
  std::function<std::vector<comm::Future>(const comm::Group& group, const NamedTensors& buffers)> run;
  Place place = Place::kAfterForward;
};

// What does not depend on the module's type.
class DataParallelBase : public nn::Module, public Joinable, private reducer::GradientOwner {
 public:
  ~DataParallelBase() override;
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  // ---- training

  // Forwards inside the scope are not followed by a reduction: their gradients accumulate on this rank until a backward
  // that belongs to a forward outside.
  class NoSync {
   public:
    explicit NoSync(DataParallelBase& ddp) : ddp_(ddp), before_(ddp.synchronizes_.exchange(0)) {}
    ~NoSync() { ddp_.synchronizes_.set(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallelBase& ddp_;
    int64_t before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // Instead of averaging. Before the first step; at most one.
  void register_comm_hook(CommHook hook);
  void register_buffer_hook(BufferHook hook);
  // ZeRO, stage 2: a rank of the group for each of managed_parameters(), which alone keeps the average of its gradient;
  // on the others backward leaves none. Before the first step. zero::ZeroOptimizer::shard_gradients() chooses them.
  void set_gradient_owners(std::vector<int> owners);
  // Declares that every step uses the same parameters in the same way; before training.
  void set_static_graph();
  // Goes on in another group, also after a backward that failed. Every member of it calls this; other ranks may.
  void set_group(const comm::Group& group);
  // Makes the states of all ranks those of rank `source` (global).
  void sync_module_states(int source);
  // Lets go of the module: backward no longer reduces anything.
  void remove_hooks();
  // Throws what the next forward would: gradients that never came.
  void check_finished();
  // Compares the module's parameters with those of the other ranks once more, as the constructor did. Collective.
  void verify_parameters();
  // The buckets that tensors like these would be reduced in.
  reducer::BucketAssignment assign_buckets(std::span<const Tensor> tensors, std::span<const size_t> limits);

  // ---- what it works on, and how

  const comm::Group& group() const { return reducer_->group(); }
  // What is reduced, in the order of the indices that hooks, errors and logs use.
  const NamedTensors& managed_parameters() const { return parameters_; }
  reducer::Reducer& reducer() { return *reducer_; }
  const reducer::Reducer& reducer() const { return *reducer_; }
  const DdpOptions& options() const { return options_; }
  // Only called with mixed precision.
  const std::vector<MixedParameters::Entry>& mixed_parameters() const { return mixed_->entries(); }
  DdpLog log() const;
  // Times are taken in the first ten steps, and then in every one that this divides.
  void set_sample_rate(int64_t steps);

  // Parameters and buffers of the module by name, those that are parts of sharded ones (localized.h) as sharded
  // tensors: what a checkpoint saves. Without history; they share memory with the module's.
  NamedTensors sharded_state_dict();

  const char* type_name() const override { return "DistributedDataParallel"; }
  // The module has no name here: tensors keep theirs, so that what is saved here loads without the wrapper, and back.
  void visit_members(nn::MemberVisitor& visitor) override { visitor.module("", *module_); }

  // ---- ranks that run out of inputs (join.h)

  const comm::Group& join_group() const override { return reducer_->group(); }
  void shadow_step(Join& join) override;
  void note_join(bool began) override { is_joined_.set(began ? 1 : 0); }
  void after_join(int authority) override;

 protected:
  DataParallelBase();
  void attach(nn::Module& module, const comm::Group& group, const DdpOptions& options);
  void attach(nn::Module& module, const DdpOptions& options);

  // Called where an exception is being handled (Note [Exceptions]).
  void note_exception();
  bool casts_inputs() const { return mixed_.has_value(); }
  void cast(Tensor& input) const { mixed_->cast(input); }

  // One forward: constructed before it, told the outputs after it.
  class ForwardScope {
   public:
    explicit ForwardScope(DataParallelBase& ddp);
    // Puts the output behind the node that tells when its backward begins.
    void pass(Tensor& output);
    void finish();

   private:
    DataParallelBase& ddp_;
    trace::Span span_{"forward"};
    bool records_;  // gradients are wanted,
    bool reduced_;  // and averaged
    std::optional<autograd::NewNode> node_;
    Substitution shadows_;
  };

 private:
  struct PassThrough;
  struct Link;  // how nodes and hooks find this object; empty when it is gone

  // Gradients are where the backward that runs puts them, outside of one the parameters' own.
  Tensor gradient(size_t index) override { return autograd::current_sink().gradient(parameters_[index].second); }
  void set_gradient(size_t index, const Tensor& gradient) override;
  void set_destination(size_t index, const Tensor& view) override;
  void complete(size_t index) override { complete_gradient(parameters_[index].second); }
  void move_out(size_t index, const Tensor& view) override;

  // Runs f; what it throws is in the log too.
  template <class F>
  auto logged(const F& f);
  void wrap(nn::Module& module, const comm::Group& group, const DdpOptions& options);
  void add_hooks();
  void begin_backward();
  void end_backward();
  void before_forward(bool records);
  void after_forward(bool records, bool reduced);
  bool is_synchronizing() const { return synchronizes_.read("whether a module is in no_sync()") != 0; }
  // True if any rank's forward will be reduced.
  bool tell_whether_reduced(bool reduced);
  const std::vector<Tensor>& buffers();
  bool buffers_are_due() { return options_.broadcast_buffers && buffers_due_ && !buffers().empty(); }
  void sync_buffers();
  void broadcast_buffers(int root);
  int agree_on_live_rank(bool alive);
  void run_buffer_hook();
  void broadcast_states(int root);

  nn::Module* module_ = nullptr;
  DdpOptions options_;
  std::unordered_set<std::string> ignored_;
  NamedTensors parameters_;
  std::unique_ptr<reducer::Reducer> reducer_;
  std::shared_ptr<Link> link_;
  std::vector<HookHandle> hooks_;
  Localized localized_;
  std::optional<MixedParameters> mixed_;
  BufferHook buffer_hook_;
  std::vector<comm::Future> buffer_futures_;
  std::vector<Tensor> buffers_;       // as they are now; kept for its memory
  graph::HostValue synchronizes_{1};  // not inside no_sync()
  graph::HostValue is_joined_{0};     // inside join()
  bool buffers_due_ = true;           // the forward before was reduced

  DdpRecorder recorder_;
};

template <class M>
class DistributedDataParallel final : public DataParallelBase {
 public:
  // The module's tensors stay those that other handles on it have.
  DistributedDataParallel(M module, const comm::Group& group, const DdpOptions& options = {})
      : module_(std::move(module)) {
    attach(module_, group, options);
  }
  DistributedDataParallel(M module, const DdpOptions& options) : module_(std::move(module)) {
    attach(module_, options);
  }
  M& module() { return module_; }
  const M& module() const { return module_; }

  template <class... Args>
  auto forward(Args&&... args) {
    if constexpr (requires(std::decay_t<Args> & ... copies) { module_(copies...); }) {
      if (casts_inputs()) {
        std::tuple<std::decay_t<Args>...> inputs(args...);
        visit_tensors(inputs, [this](Tensor& input) { this->cast(input); });
        return std::apply([this](auto&... input) { return this->run(input...); }, inputs);
      }
    }
    return run(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return nn::call(*this, std::forward<Args>(args)...);
  }

 private:
  template <class... Args>
  auto run(Args&&... args) {
    ForwardScope scope(*this);
    if constexpr (std::is_void_v<decltype(module_(std::forward<Args>(args)...))>) {
      run_module(std::forward<Args>(args)...);
      scope.finish();
    } else {
      auto result = run_module(std::forward<Args>(args)...);
      visit_tensors(result, [&](Tensor& output) { scope.pass(output); });
      scope.finish();
      return result;
    }
  }
  template <class... Args>
  auto run_module(Args&&... args) {
    try {
      return module_(std::forward<Args>(args)...);
    } catch (...) {
      note_exception();
      throw;
    }
  }

  M module_;
};

}  // namespace chorale::parallel
