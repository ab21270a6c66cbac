// Optimizers: they turn gradients into updates of parameters.
//
//   optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
//   for (…) {
//     optimizer.zero_grad();
//     backward(loss(model(x), y));
//     optimizer.step();
//   }
//
// A step is one op for each group of parameters (op/update.h), one pass over all of them, their gradients and states.
// Parameters of f16 and bf16 keep a master copy in f32. An optimizer is used by one thread at a time.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/base/parallel_for.h"
#include "chorale/graph/host_value.h"
#include "chorale/kernel/attrs.h"
#include "chorale/op/update.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::optim {

// Parameters that share options; Options is a struct of an optimizer, such as AdamOptions.
template <class Options>
struct ParameterGroup {
  NamedTensors parameters;
  Options options;
};

enum class ZeroGrad : uint8_t {
  kToNone,   // parameters have no gradient until the next backward: no memory, no pass
  kInPlace,  // gradients stay where they are and become zero; sparse ones go
};

class Optimizer {
 public:
  virtual ~Optimizer();
  // Hooks of parameters refer to it (update_in_backward).
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient.
  void step() { step_unless({}); }
  // The same, but where `found_inf`, a floating tensor without dimensions, is not 0, nothing changes. It is read when
  // the update runs: a step that was recorded asks anew each time.
  void step_unless(const Tensor& found_inf);
  // Runs `closure`, which computes gradients and returns the loss, then steps; returns the loss.
  Tensor step(const std::function<Tensor()>& closure);
  void zero_grad(ZeroGrad how = ZeroGrad::kToNone);

  // From now on each parameter is updated inside backward, as soon as its gradient is complete and while it is still in
  // cache, and the gradient is let go: the same bits as step(), less memory and less time. step() stays the end of a
  // step, and a second gradient for a parameter before it is an error. Whatever needs all gradients first (clipping by
  // their norm, GradScaler, a closure, accumulating over several backward passes) cannot be combined with it.
  void update_in_backward();
  bool updates_in_backward() const { return !hooks_.empty(); }

  // All that is needed to go on later: options of groups, step counts and states by the parameters' names, such as
  // "groups/0/lr" and "state/encoder.weight/exp_avg". Numbers are tensors without dimensions, so that any file of
  // tensors can hold it.
  NamedTensors state_dict() const;
  // Takes over a state of the same parameters, in whatever order they are given now. Checks everything before it
  // changes anything; InvalidArgument lists the names that are missing and unexpected.
  void load_state_dict(const NamedTensors& state);

  size_t group_count() const { return groups_.size(); }
  // Options by name, as numbers: what schedulers turn. A name that the optimizer does not have is an error.
  double option(size_t group, std::string_view name) const;
  bool has_option(std::string_view name) const;
  void set_option(size_t group, std::string_view name, double value);
  double lr(size_t group = 0) const { return option(group, "lr"); }
  // Sets it for all groups, or for one.
  void set_lr(double lr);
  void set_lr(size_t group, double lr) { set_option(group, "lr", lr); }

  // Every parameter, group by group.
  std::vector<Tensor> parameters() const;

 protected:
  static constexpr size_t kMaxStates = UpdateLists::kMaxStates;
  // What the lists of states hold, by the names of state_dict; null where there is nothing.
  using StateNames = std::array<const char*, kMaxStates>;

  // `name` is for messages.
  explicit Optimizer(const char* name) : name_(name) {}
  void add_group(const NamedTensors& parameters, const Attrs& options);

  // Throws InvalidArgument for options out of range.
  virtual void check(const Attrs& options) const = 0;
  virtual StateNames states(const Attrs& options) const = 0;
  // The update itself. Its lists of states are those that states() names, without gaps.
  virtual void update(const UpdateLists& lists, const Attrs& options) const = 0;
  // What a new state holds, the one that states() names at this place.
  virtual double initial_state(const Attrs&, size_t) const { return 0; }
  // Whether that state is one f64 number for each parameter instead of one for each element.
  virtual bool is_number(size_t) const { return false; }
  // Whether an element with a zero gradient stays as it is, state and all: then a sparse gradient touches its rows
  // only.
  virtual bool takes_sparse(const Attrs&) const { return false; }

  const char* name() const { return name_; }
  const Attrs& options_of(size_t group) const;
  void replace_options(size_t group, const Attrs& options);

 private:
  struct Parameter {
    std::string name;
    Tensor tensor;
    size_t group = 0;
    Tensor step;      // i64: updates so far
    Tensor master{};  // of the 16-bit types
    std::array<Tensor, kMaxStates> state{};
    bool updated = false;  // inside backward, since the last step()
  };
  struct Group {
    Attrs options;
    StateNames states;
    Tensor lr;  // of the options, as updates read it
  };
  // Rows of a parameter with a sparse gradient: they are updated apart and put back.
  struct TouchedRows {
    Tensor rows;
    std::vector<std::pair<Tensor, Tensor>> tensors;  // whole, rows of it
  };
  // What one op updates: the parameters of a group, those of the 16-bit types apart. The lists, but for the gradients,
  // are kept between steps, since the next step mostly has the same ones.
  struct Batch {
    size_t group = 0;
    size_t size = 0;  // of this step, so far
    UpdateLists lists;
  };

  // Empties the batches at the end of a step, also when the step throws.
  struct BatchScope {
    Optimizer& optimizer;
    std::span<Batch> batches;
    ~BatchScope() { optimizer.clear(batches); }
  };

  void clear(std::span<Batch> batches);
  Batch& batch_of(const Parameter& parameter);
  void add_to(Batch& batch, Parameter& parameter, Tensor gradient);
  void add_sparse(Batch& batch, const Parameter& parameter, const Tensor& gradient);
  void add(Batch& batch, const Parameter& parameter, Tensor gradient,
           base::FunctionRef<const Tensor&(const Tensor&)> part) const;
  void update_all(std::span<Batch> batches, const Tensor& found_inf);
  void fit_states(Parameter& parameter) const;
  void follow_rate(Group& group) const;
  // Options but for the rates, which updates read from tensors.
  void follow_options();
  void note_read() const;
  const kernel::Field& field_called(const Attrs& options, std::string_view name) const;
  static void set_field(Attrs& options, const kernel::Field& field, double value);
  static double number_of(const Attrs& options, const kernel::Field& field);
  void update_one(uint32_t parameter);

  const char* name_;
  std::vector<Group> groups_;
  std::vector<Parameter> parameters_;
  std::vector<HookHandle> hooks_;
  std::vector<Batch> batches_;      // two for each group
  std::vector<Batch> own_batches_;  // one for each parameter, when it is updated in backward
  std::vector<TouchedRows> touched_;
  // What a step that was recorded depends on besides tensors: options but for the rates, and how often
  // load_state_dict() has put other tensors in the place of states.
  graph::HostValue options_seen_{0}, states_seen_{0};
};

// The part of an optimizer that knows the type of its options.
template <class Options>
class OptimizerOf : public Optimizer {
 public:
  const Options& options(size_t group = 0) const { return options_of(group).template get<Options>(); }
  void set_options(size_t group, const Options& options) { replace_options(group, options); }

 protected:
  using Optimizer::Optimizer;
  void add_groups(const std::vector<ParameterGroup<Options>>& groups) {
    for (const auto& group : groups) add_group(group.parameters, group.options);
  }
};

}  // namespace chorale::optim
