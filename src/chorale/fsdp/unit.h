// Inside fully sharded training: the group of parameters of one call of fully_shard, and its life cycle.
//
// Note [Life cycle]
// Forward: the parameters are gathered, a node is put on the inputs, the module runs, the parameters are let go as the
// policy says, and nodes are put on the outputs. Backward: the first output node gathers them again and begins to
// gather the group that will be needed next; when the inputs' node runs, every gradient inside the module is complete:
// the gradients are taken, the parameters let go, and the reduction starts. A group whose inputs ask for no gradient is
// finished at the end of backward. One reduction is in flight at a time: the next one, or the end, waits for it.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "chorale/comm/progress_thread.h"
#include "chorale/comm/work.h"
#include "chorale/device/stream.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/fsdp/sharded_parameter.h"
#include "chorale/trace/trace.h"

namespace chorale::fsdp {

// Gradients of one group on their way.
struct Reduction {
  std::shared_ptr<Unit> unit;
  std::vector<size_t> parameters;  // of the unit
  std::vector<Tensor> parts;       // of their gradients, in the dtype of reduction
  std::vector<Tensor> sources;     // kept until it is done
  comm::Work work;
  bool all_reduces = false;
  trace::Clock::time_point launched{};  // where events are traced
};

// What the groups that compute together share.
struct Context {
  std::vector<std::weak_ptr<Unit>> units;  // the root first
  // Groups in the order in which their forwards ended; a backward asks for them from the end.
  std::vector<std::weak_ptr<Unit>> order;
  std::optional<Reduction> reduction;
  bool is_in_backward = false;  // and its end was asked to call us
  bool is_last_backward = true;
  bool has_failed = false;  // a backward was left by an exception
  std::function<void(const Event&)> listener;
  std::optional<chorale::Event> updated;  // the next forward of the root begins behind it
  std::chrono::nanoseconds waited{};
  // Threads that move calls on, by the group's engine; last, so that they end first.
  std::map<const comm::Engine*, comm::ProgressThread> helpers;

  void wait_for(const comm::Work& work);

  void finish_reduction();
  void finish_backward();
  void reset();
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit(size_t modules, const Options& options);

  // ---- construction
  void take_parameters(const std::vector<nn::Module*>& modules);
  void attach(nn::Module& module, size_t index);

  // ---- hooks
  void before_forward(size_t index, nn::Module& module, std::vector<Tensor>& inputs);
  void after_forward(size_t index, std::vector<Tensor>& outputs);
  void before_backward(bool first_of_call);
  void after_backward();

  // ---- what they are made of
  void unshard();
  void wait_for_unshard();
  void reshard();
  void reset();
  // Waits for what was gathered ahead and not used.
  void drop_gather();
  void end_backward();

  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const std::shared_ptr<Context>& context() const { return context_; }
  const std::string& path() const { return path_; }
  bool is_root() const { return is_root_; }
  bool is_unsharded() const { return state_ == State::kWhole; }
  bool is_running() const { return !running_.empty(); }
  // Bytes of the parameter as it is gathered.
  int64_t gathered_bytes(const ShardedParameter& p) const;
  bool owns(const Tensor& parameter) const { return index_.contains(parameter.impl()); }
  void forget_round() { running_.clear(); }
  // The ranks over which parameters are sharded and replicated.
  const Mesh& mesh() const { return options_.mesh; }

  void set_policy(ReshardAfterForward policy);
  void share(std::shared_ptr<Context> context) { shared_ = std::move(context); }
  void set_payload(const std::function<std::optional<Payload>(const Tensor&)>& choose);

  bool syncs = true, all_reduces = true, reshards_after_backward = true, forces_sum = false, reduces_unused = false;
  std::optional<double> divide_factor;
  std::vector<std::weak_ptr<Unit>> ahead_in_forward, ahead_in_backward;

 private:
  friend struct Context;
  enum class State : uint8_t { kSharded, kPiece, kWhole };
  struct Gather {
    comm::Work work;
    std::vector<std::vector<Tensor>> rooms;  // by parameter: the whole, or what its payload's parts make
    trace::Clock::time_point launched{};     // where events are traced
  };
  struct Slot {
    nn::Parameter* place;
    size_t parameter;
  };

  void find_slots(size_t index, nn::Module& module);
  void put_into_module();
  std::vector<Tensor> sent_parts(const ShardedParameter& p) const;
  void become_root(nn::Module& module);
  void reshard_after_forward();
  bool is_stale() const;
  void note(Event::Kind kind) const;
  // Notes a span in the trace: it began at `began`, and ended with the work, or now.
  void note_span(const char* what, trace::Clock::time_point& began, const comm::Work* work = nullptr) const;
  void wake_helper(const comm::Group& group) const;
  const comm::Group& shards() const { return options_.mesh.group(options_.mesh.dims() - 1); }
  int data_parallel_size() const { return options_.mesh.size(); }
  DType parameter_dtype(const ShardedParameter& p) const;
  // Where an outermost module computes.
  Device device() const;
  // Called before the outermost module computes.
  void begin_round(std::vector<Tensor>& inputs) const;
  // The tensor where the module computes, or where parts are kept.
  Tensor where_it_computes(const Tensor& x) const;
  Tensor where_parts_are(const Tensor& x) const;
  DType reduce_dtype(DType gradient) const;
  double factor() const;
  void reduce();
  void finish(Reduction& reduction);
  void cast(std::vector<Tensor>& tensors, DType dtype) const;
  std::vector<Tensor> with_node_after(const std::vector<Tensor>& inputs);

  Options options_;
  std::vector<ShardedParameter> parameters_;
  std::unordered_map<const Tensor::Impl*, size_t> index_;  // by sharded parameter
  std::vector<std::vector<Slot>> slots_;                   // by module; where its parameters are
  std::vector<const nn::Module*> places_;                  // of the modules, when they were last seen
  std::vector<std::weak_ptr<nn::ModuleExtension>> alive_;
  std::set<size_t> running_;   // modules of this round of forwards that have not run yet
  std::optional<Mesh> fewer_;  // the ranks that gather for backward, where those are fewer
  State state_ = State::kSharded;
  std::optional<Gather> gather_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Context> shared_;  // with other outermost modules
  std::vector<size_t> positions_;    // in the context's order, of forwards whose backward has not begun
  std::string path_;
  trace::Clock::time_point forward_began_{}, backward_began_{};  // where events are traced
  uint64_t number_ = 0;
  bool is_root_ = false;
};

// What is attached to a module.
struct Attachment final : nn::ModuleExtension {
  explicit Attachment(std::shared_ptr<Unit> of) : unit(std::move(of)) {}
  void before_state() override;
  void before_clone() const override;
  std::shared_ptr<Unit> unit;
};
// Null where there is none.
std::shared_ptr<Unit> unit_of(const nn::Module& module);

}  // namespace chorale::fsdp
