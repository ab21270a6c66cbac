// Fully sharded training: every rank keeps a part of each parameter, of its gradient and of the optimizer's state.
// Before a module computes, its parameters are gathered; afterwards they are let go; gradients are reduced to parts.
//
//   for (Block& block : model.blocks) fully_shard(block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});
//   optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});  // sharded tensors
//   backward(loss(model(x), y));
//   optimizer.step();
//
// A call makes one group of all parameters below the module that no earlier call took: one all-gather per use and one
// reduce-scatter per backward. So call it from the inside to the outside. The module is changed in place; names,
// parameter objects and types stay. Between a forward and the end of its backward the module must not be moved.
// Every rank of the mesh makes the same calls in the same order.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/device/stream.h"
#include "chorale/fsdp/options.h"
#include "chorale/nn/module.h"

namespace chorale::fsdp {

class Unit;

void fully_shard(nn::Module& module, const Options& options);
// One group of several modules. None of them can be the outermost one.
void fully_shard(const std::vector<nn::Module*>& modules, const Options& options);

bool is_fully_sharded(const nn::Module& module);

// ---- by hand

// Parameters on their way.
class Unsharding {
 public:
  explicit Unsharding(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}
  void wait();

 private:
  std::shared_ptr<Unit> unit_;
};
// Gathers the parameters of the module's own group, if they are not there. Without `async` they are there afterwards.
Unsharding unshard(nn::Module& module, bool async = false);
void reshard(nn::Module& module);
// Called after an exception in forward or backward: forgets that step, with its gradients, on all groups below.
void reset_iter_state(nn::Module& module);
// Calls a function of the module other than forward as forward is called: with its parameters gathered.
std::vector<Tensor> call_method(nn::Module& module, std::vector<Tensor> inputs,
                                const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& method);

// Parameters are updated on another stream than the current one, up to this point: the next forward of this outermost
// module begins behind it, where otherwise it would be behind the current stream alone. After the first forward.
void set_post_optimizer_event(nn::Module& root, chorale::Event updated);

// ---- accumulation of gradients: `recurse` includes all groups below

// Where it is not wanted, gradients stay whole and are added up until a backward for which it is.
void set_requires_gradient_sync(nn::Module& module, bool wanted, bool recurse = true);
// Replicas of shards obey it. Where it is not wanted, gradients are reduced over shards only, and over replicas by a
// later backward for which it is.
void set_requires_all_reduce(nn::Module& module, bool wanted, bool recurse = true);
void set_reshard_after_forward(nn::Module& module, ReshardAfterForward policy, bool recurse = true);
void set_reshard_after_backward(nn::Module& module, bool wanted, bool recurse = true);
// Whether backward keeps what it knows of the order for further backward passes of the same forwards.
void set_is_last_backward(nn::Module& module, bool last);
// Gradients are divided by this instead of the number of ranks; of the module's own group only.
void set_gradient_divide_factor(nn::Module& module, double factor);
// Sums first, and divides afterwards.
void set_force_sum(nn::Module& module, bool wanted, bool recurse = true);
// Parameters without a gradient take part in the reduction, with zeros.
void set_reduces_unused(nn::Module& module, bool wanted, bool recurse = true);

// ---- which groups are gathered ahead

void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& ahead);
void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& ahead);

// Outermost modules that compute one after another, such as the stages of a pipeline on one rank: a backward gathers
// ahead from one to the next, and one reduction is in flight for all of them. Before their first forward.
void share_comm_context(const std::vector<nn::Module*>& roots);

// ---- what is sent

// What travels instead of a parameter's part, say in another precision or with scales beside it.
struct Payload {
  // Contiguous tensors, of which each is as long as the part in the dimension by which that is cut.
  std::function<std::vector<Tensor>(const Tensor& part)> of_part;
  // The whole parameter, of those tensors put together from all ranks.
  std::function<Tensor(const std::vector<Tensor>& wholes)> to_whole;
};
// Gives payloads to the parameters of the module's own group for which `choose` returns one. A later call replaces
// them.
void set_payload(nn::Module& module, const std::function<std::optional<Payload>(const Tensor& parameter)>& choose);

// What happens, in order.
struct Event {
  enum class Kind : uint8_t { kUnshard, kReshard, kPostBackward };
  Kind kind;
  std::string module;  // its path below the outermost fully sharded one
  friend bool operator==(const Event&, const Event&) = default;
};
std::ostream& operator<<(std::ostream& out, const Event& event);  // U(layers.0), R(…), PB(…)
// Calls `listener` for the events of all groups that compute together with this one, after their first forward; an
// empty one ends that.
void on_event(nn::Module& root, std::function<void(const Event&)> listener);

// ---- parameters

// The parameters of the module's own group, sharded, in their order.
NamedTensors own_parameters(nn::Module& module);

// Bytes on this rank, of all groups below.
struct Sizes {
  int64_t parts = 0;          // of parameters
  int64_t gradients = 0;      // of the parts that want one
  int64_t gathered = 0;       // whole parameters that are there now
  int64_t largest_block = 0;  // whole parameters of the largest group
};
Sizes sizes_of(nn::Module& module);
// Seconds that this rank has waited for parameters and gradients, of all groups that compute together with this one,
// since their first forward.
double seconds_waited(nn::Module& module);

}  // namespace chorale::fsdp
