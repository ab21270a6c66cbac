#include "chorale/optim/optimizer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <unordered_set>

#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/sparse.h"
#include "chorale/op/view.h"
#include "chorale/optim/state_reader.h"
#include "chorale/sharding/sharded.h"
#include "chorale/trace/trace.h"

namespace chorale::optim {

Optimizer::~Optimizer() {
  for (HookHandle& hook : hooks_) hook.remove();
}

void Optimizer::add_group(const NamedTensors& parameters, const Attrs& options) {
  check(options);
  CHORALE_CHECK(!parameters.empty(), "[", name_, "] group ", groups_.size(), " has no parameters");
  std::unordered_set<std::string> names;
  std::unordered_set<const Tensor::Impl*> tensors;
  for (const Parameter& known : parameters_) {
    names.insert(known.name);
    tensors.insert(known.tensor.impl());
  }
  for (const auto& [name, tensor] : parameters) {
    CHORALE_CHECK(tensor.defined(), "[", name_, "] parameter ", name, " is undefined");
    CHORALE_CHECK(names.insert(name).second, "[", name_, "] two parameters are called ", name,
                  "; states are kept by name, so names must differ");
    CHORALE_CHECK(tensors.insert(tensor.impl()).second, "[", name_, "] parameter ", name,
                  " is given twice under different names; give a shared parameter once");
    CHORALE_CHECK(is_floating(tensor.dtype()), "[", name_, "] parameter ", name, " is ", tensor.dtype(),
                  "; expected f16, bf16, f32 or f64");
    CHORALE_CHECK(is_leaf(tensor), "[", name_, "] parameter ", name,
                  " was computed by an op; only leaves can be optimized");
    CHORALE_CHECK(tensor.device() == parameters.front().second.device(), "[", name_, "] parameter ", name, " is on ",
                  tensor.device(), ", and the first of its group on ", parameters.front().second.device(),
                  "; give parameters of another device a group of their own");
    CHORALE_CHECK(is_dense(tensor.sizes(), tensor.strides()), "[", name_, "] parameter ", name, " of shape ",
                  tensor.sizes(), " has holes or overlaps in memory; make it contiguous first");
    parameters_.push_back(
        {.name = name, .tensor = tensor, .group = groups_.size(), .step = full({}, 0, DType::kI64, tensor.device())});
  }
  const Device device = parameters.front().second.device();
  const Tensor lr = full({}, number_of(options, field_called(options, "lr")), DType::kF64, device);
  groups_.push_back({.options = options, .states = states(options), .lr = lr});
  for (int halves = 0; halves < 2; ++halves) {
    batches_.emplace_back().group = groups_.size() - 1;
    batches_.back().lists.lr = lr;
  }
  follow_options();
}

// ---- options

const Attrs& Optimizer::options_of(size_t group) const {
  CHORALE_CHECK(group < groups_.size(), "[", name_, "] there is no group ", group, "; there are ", groups_.size());
  return groups_[group].options;
}

void Optimizer::replace_options(size_t group, const Attrs& options) {
  options_of(group);
  check(options);
  groups_[group].options = options;
  groups_[group].states = states(options);
  follow_rate(groups_[group]);
  follow_options();
}

void Optimizer::follow_options() {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const Group& group : groups_) {
    for (const kernel::Field& field : group.options.type()->fields) {
      if (std::string_view(field.name) == "lr") continue;
      hash = (hash ^ std::bit_cast<uint64_t>(number_of(group.options, field))) * 1099511628211u;
    }
  }
  options_seen_.set(static_cast<int64_t>(hash));
}

void Optimizer::note_read() const {
  options_seen_.read("an option of an optimizer");
  states_seen_.read("whether states of an optimizer are the tensors that they were");
}

void Optimizer::follow_rate(Group& group) const {
  const NoGrad quiet;
  fill_(group.lr, number_of(group.options, field_called(group.options, "lr")));
}

bool Optimizer::has_option(std::string_view name) const {
  const auto fields = groups_.front().options.type()->fields;
  return std::any_of(fields.begin(), fields.end(), [&](const kernel::Field& field) { return field.name == name; });
}

const kernel::Field& Optimizer::field_called(const Attrs& options, std::string_view name) const {
  for (const kernel::Field& field : options.type()->fields) {
    if (field.name == name) return field;
  }
  throw InvalidArgument(concat("[", name_, "] has no option ", name, "; its options are ", options));
}

double Optimizer::option(size_t group, std::string_view name) const {
  const Attrs& options = options_of(group);
  return number_of(options, field_called(options, name));
}

double Optimizer::number_of(const Attrs& options, const kernel::Field& field) {
  const kernel::FieldValue value = options.at(field);
  return std::holds_alternative<bool>(value) ? static_cast<double>(std::get<bool>(value)) : std::get<double>(value);
}

void Optimizer::set_field(Attrs& options, const kernel::Field& field, double value) {
  if (field.kind == kernel::FieldKind::kBool) {
    options.set(field.name, value != 0);
  } else {
    options.set(field.name, value);
  }
}

void Optimizer::set_option(size_t group, std::string_view name, double value) {
  Attrs options = options_of(group);
  set_field(options, field_called(options, name), value);
  replace_options(group, options);
}

void Optimizer::set_lr(double lr) {
  for (size_t group = 0; group < groups_.size(); ++group) set_lr(group, lr);
}

std::vector<Tensor> Optimizer::parameters() const {
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
}

// ---- steps

void Optimizer::step_unless(const Tensor& found_inf) {
  const trace::Span span("optimizer");
  const NoGrad quiet;
  const BatchScope scope{*this, batches_};
  note_read();
  for (Parameter& parameter : parameters_) {
    if (Tensor gradient = chorale::gradient(parameter.tensor); gradient.defined())
      add_to(batch_of(parameter), parameter, std::move(gradient));
    parameter.updated = false;
  }
  update_all(batches_, found_inf);
}

Tensor Optimizer::step(const std::function<Tensor()>& closure) {
  CHORALE_CHECK(closure, "[", name_, "] step() was given an empty function");
  CHORALE_CHECK_STATE(!updates_in_backward(), "[", name_,
                      "] a closure cannot be combined with update_in_backward(): its backward would already update");
  Tensor loss;
  {
    const EnableGrad record;
    loss = closure();
  }
  step();
  return loss;
}

void Optimizer::zero_grad(ZeroGrad how) {
  for (const Parameter& parameter : parameters_) {
    const Tensor gradient = chorale::gradient(parameter.tensor);
    if (!gradient.defined()) continue;
    if (how == ZeroGrad::kToNone || gradient.is_sparse()) {
      set_gradient(parameter.tensor, {});
    } else {
      const NoGrad quiet;
      fill_(gradient, 0);
    }
  }
}

void Optimizer::update_in_backward() {
  if (updates_in_backward()) return;
  std::unordered_set<const Storage*> storages;
  for (const Parameter& parameter : parameters_) {
    CHORALE_CHECK_STATE(requires_grad(parameter.tensor), "[", name_, "] parameter ", parameter.name,
                        " requires no gradient; leave it out of an optimizer that updates in backward");
    // Backward notices writes by storage, and would take the update of one parameter for a write into the other.
    CHORALE_CHECK(storages.insert(parameter.tensor.storage().get()).second, "[", name_, "] parameter ", parameter.name,
                  " shares its memory with another one; then updates must wait for the end of backward: use step()");
  }
  own_batches_.resize(parameters_.size());
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    own_batches_[i].group = parameters_[i].group;
    own_batches_[i].lists.lr = groups_[parameters_[i].group].lr;
    hooks_.push_back(after_complete(parameters_[i].tensor, [this, i](const Tensor&, autograd::GradSink& sink) {
      // Gradients that a backward puts elsewhere are not for this optimizer.
      if (&sink == &autograd::grad_field_sink()) update_one(i);
    }));
  }
}

void Optimizer::update_one(uint32_t i) {
  Parameter& parameter = parameters_[i];
  CHORALE_CHECK_STATE(!parameter.updated, "[", name_, "] parameter ", parameter.name,
                      " got a second gradient before step(): call step() after each backward, and do not accumulate "
                      "gradients over several ones under update_in_backward()");
  const NoGrad quiet;
  const std::span<Batch> own(&own_batches_[i], 1);
  const BatchScope scope{*this, own};
  note_read();
  add_to(own.front(), parameter, chorale::gradient(parameter.tensor));
  update_all(own, {});
  parameter.updated = true;
  set_gradient(parameter.tensor, {});
}

void Optimizer::fit_states(Parameter& parameter) const {
  const Group& group = groups_[parameter.group];
  const Tensor& tensor = parameter.tensor;
  if (group.states == StateNames{} && !is_half(tensor.dtype())) return;
  const DType compute = compute_of(tensor.dtype());
  // A parameter may have been given another dtype or layout since the last step; its states follow.
  const auto fit = [&](Tensor& state, double initial) {
    if (state.defined() && state.dtype() == compute && state.strides() == tensor.strides()) return;
    // The state of a sharded parameter is spread over ranks as the parameter is.
    Tensor fresh = tensor.is_sharded()
                       ? to(zeros_like(tensor), compute)
                       : Tensor::empty_strided(tensor.sizes(), tensor.strides(), compute, tensor.device());
    if (state.defined()) {
      copy_(fresh, state);
    } else {
      fill_(fresh, initial);
    }
    state = std::move(fresh);
  };
  for (size_t s = 0; s < kMaxStates; ++s) {
    if (!group.states[s]) continue;
    Tensor& state = parameter.state[s];
    const double initial = initial_state(group.options, s);
    if (!is_number(s)) {
      fit(state, initial);
    } else if (!state.defined()) {
      state = full({}, initial, DType::kF64, tensor.device());
    }
  }
  // A new master is taken from the parameter by the next step, because NaN rounds to no parameter (op/update.h).
  if (is_half(tensor.dtype())) fit(parameter.master, std::numeric_limits<double>::quiet_NaN());
}

void Optimizer::add_to(Batch& batch, Parameter& parameter, Tensor gradient) {
  const Tensor& tensor = parameter.tensor;
  // Everything is known to be in order before the first byte changes.
  CHORALE_CHECK(gradient.dtype() == tensor.dtype() && gradient.sizes() == tensor.sizes(), "[", name_,
                "] the gradient of ", parameter.name, " is ", gradient.dtype(), " ", gradient.sizes(), "; expected ",
                tensor.dtype(), " ", tensor.sizes());
  tensor.storage()->check_writable(name_);
  fit_states(parameter);
  if (gradient.is_sparse()) {
    add_sparse(batch, parameter, gradient);
  } else {
    add(batch, parameter, std::move(gradient), [](const Tensor& x) -> const Tensor& { return x; });
  }
}

Optimizer::Batch& Optimizer::batch_of(const Parameter& parameter) {
  return batches_[2 * parameter.group + (is_half(parameter.tensor.dtype()) ? 1 : 0)];
}

void Optimizer::add(Batch& batch, const Parameter& parameter, Tensor gradient,
                    base::FunctionRef<const Tensor&(const Tensor&)> part) const {
  UpdateLists& lists = batch.lists;
  const size_t place = batch.size++;
  const auto put = [&](std::vector<Tensor>& list, const Tensor& x) {
    if (place >= list.size()) list.resize(place + 1);
    if (!list[place].is(x)) list[place] = x;
  };
  const StateNames& names = groups_[parameter.group].states;
  put(lists.parameters, part(parameter.tensor));
  lists.gradients.push_back(std::move(gradient));
  put(lists.steps, parameter.step);
  for (size_t s = 0, list = 0; s < kMaxStates; ++s) {
    if (names[s]) put(lists.states[list++], part(parameter.state[s]));
  }
  if (is_half(parameter.tensor.dtype())) put(lists.masters, part(parameter.master));
}

void Optimizer::add_sparse(Batch& batch, const Parameter& parameter, const Tensor& gradient) {
  const Attrs& options = groups_[parameter.group].options;
  CHORALE_CHECK(takes_sparse(options), "[", name_, "] parameter ", parameter.name,
                " has a sparse gradient, which these options cannot use without touching every element: ", options,
                "; take Adagrad or Sgd without momentum and weight decay, or ask for a dense gradient");
  const Tensor sorted = coalesce(gradient);
  const Tensor rows = sorted.sparse().indices, values = contiguous(sorted.sparse().values);
  CHORALE_CHECK(rows.size(0) == 1 && parameter.tensor.is_contiguous(), "[", name_, "] the sparse gradient of ",
                parameter.name, " must be sparse in its first dimension only, and the parameter contiguous");
  TouchedRows touched{reshape(rows, {-1}), {}};
  add(batch, parameter, values, [&](const Tensor& whole) -> const Tensor& {
    touched.tensors.emplace_back(whole, index_select(whole, 0, touched.rows));
    return touched.tensors.back().second;
  });
  touched_.push_back(std::move(touched));
}

void Optimizer::update_all(std::span<Batch> batches, const Tensor& found_inf) {
  for (Batch& batch : batches) {
    if (batch.size == 0) continue;
    UpdateLists& lists = batch.lists;
    const auto trim = [&](std::vector<Tensor>& list) {
      if (list.size() > batch.size) list.resize(batch.size);
    };
    for (auto* list : {&lists.parameters, &lists.steps, &lists.masters}) trim(*list);
    for (auto& list : lists.states) trim(list);
    lists.found_inf = found_inf;
    update(batch.lists, groups_[batch.group].options);
  }
  for (const TouchedRows& touched : touched_) {
    for (const auto& [whole, part] : touched.tensors) index_copy_(whole, 0, touched.rows, part);
  }
}

void Optimizer::clear(std::span<Batch> batches) {
  for (Batch& batch : batches) {
    batch.size = 0;
    batch.lists.gradients.clear();
    batch.lists.found_inf = {};
    // Rows that were taken out for one step are no use to the next.
    if (touched_.empty()) continue;
    UpdateLists fresh;
    fresh.lr = batch.lists.lr;
    batch.lists = std::move(fresh);
  }
  touched_.clear();
}

// ---- saving and loading

namespace {

std::string group_key(size_t group, const char* option) { return concat("groups/", group, "/", option); }
std::string state_key(const std::string& parameter, const char* state) {
  return concat("state/", parameter, "/", state);
}

}  // namespace

NamedTensors Optimizer::state_dict() const {
  const NoGrad quiet;
  NamedTensors result;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const kernel::Field& field : groups_[g].options.type()->fields)
      result.emplace_back(group_key(g, field.name), Tensor::scalar(option(g, field.name), DType::kF64));
  }
  for (const Parameter& parameter : parameters_) {
    result.emplace_back(state_key(parameter.name, "step"), clone(parameter.step));
    if (parameter.step.item<int64_t>() == 0) continue;
    const StateNames& names = groups_[parameter.group].states;
    // Options or the dtype may have changed since the last step: what the next step would make is saved as well.
    Parameter complete = parameter;
    fit_states(complete);
    for (size_t s = 0; s < kMaxStates; ++s) {
      if (names[s]) result.emplace_back(state_key(parameter.name, names[s]), clone(complete.state[s]));
    }
    if (is_half(parameter.tensor.dtype())) {
      const Tensor& master = parameter.master.defined() ? parameter.master : parameter.tensor;
      result.emplace_back(state_key(parameter.name, "master"), clone(to(master, DType::kF32)));
    }
  }
  return result;
}

void Optimizer::load_state_dict(const NamedTensors& state) {
  const NoGrad quiet;
  StateReader reader(name_, state);
  std::vector<Group> groups = groups_;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const kernel::Field& field : groups[g].options.type()->fields)
      set_field(groups[g].options, field, reader.number(group_key(g, field.name)));
    groups[g].states = states(groups[g].options);
  }
  std::vector<Parameter> parameters = parameters_;
  for (Parameter& parameter : parameters) {
    const Tensor& tensor = parameter.tensor;
    const auto load = [&](const char* name, bool number = false) {
      const Tensor found = reader.tensor(state_key(parameter.name, name), number ? Shape{} : tensor.sizes());
      if (!found.defined()) return Tensor{};
      if (number) return clone(to(found, DType::kF64));
      const DType compute = compute_of(tensor.dtype());
      if (!tensor.is_sharded()) {
        Tensor own = Tensor::empty_strided(tensor.sizes(), tensor.strides(), compute, tensor.device());
        copy_(own, found);
        return own;
      }
      // Spread as the parameter is; of a whole one every rank takes its part.
      Tensor own = to(zeros_like(tensor), compute);
      copy_(own, found.is_sharded() ? found : distribute(found, mesh_of(tensor), placements_of(tensor), std::nullopt));
      return own;
    };
    const int64_t steps = reader.whole_number(state_key(parameter.name, "step"));
    parameter.step = full({}, steps, DType::kI64, tensor.device());
    parameter.updated = false;
    parameter.master = {};
    parameter.state = {};
    if (steps == 0) continue;
    const StateNames& names = groups[parameter.group].states;
    for (size_t s = 0; s < kMaxStates; ++s) {
      if (names[s]) parameter.state[s] = load(names[s], is_number(s));
    }
    if (is_half(tensor.dtype())) parameter.master = load("master");
  }
  reader.finish();
  for (const Group& group : groups) check(group.options);
  // States stay where they are, so that steps that were recorded go on with them.
  bool moved = false;
  const auto keep = [&](const Tensor& own, Tensor& loaded) {
    if (!own.defined()) return;
    const bool fits = loaded.defined() && !own.is_sharded() && !loaded.is_sharded() && own.dtype() == loaded.dtype() &&
                      own.device() == loaded.device() && own.sizes() == loaded.sizes() &&
                      own.strides() == loaded.strides();
    moved |= !fits;
    if (!fits) return;
    copy_(own, loaded);
    loaded = own;
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    keep(parameters_[i].step, parameters[i].step);
    keep(parameters_[i].master, parameters[i].master);
    for (size_t s = 0; s < kMaxStates; ++s) keep(parameters_[i].state[s], parameters[i].state[s]);
  }
  groups_ = std::move(groups);
  parameters_ = std::move(parameters);
  for (Group& group : groups_) follow_rate(group);
  follow_options();
  if (moved) states_seen_.set(states_seen_.value() + 1);
}

}  // namespace chorale::optim
