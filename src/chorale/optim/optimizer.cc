#include "chorale/optim/optimizer.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "chorale/base/parallel_for.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/sparse.h"
#include "chorale/optim/state_reader.h"
#include "chorale/trace/trace.h"

namespace chorale::optim {
namespace {

// Fewer elements are not worth waking a thread for: it takes some microseconds, and an element one nanosecond at most.
constexpr int64_t kGrainElems = 32768;

void* advance(void* pointer, int64_t elems, DType dtype) {
  return pointer ? static_cast<std::byte*>(pointer) + elems * static_cast<int64_t>(size_of(dtype)) : nullptr;
}

}  // namespace

vec::UpdateSpan Optimizer::piece_of(const Job& job, int64_t begin, int64_t n) {
  vec::UpdateSpan piece = job.span;
  const DType compute = compute_of(job.dtype);
  piece.weight = advance(piece.weight, begin, compute);
  piece.rounded = advance(piece.rounded, begin, job.dtype);
  piece.gradient = advance(const_cast<void*>(piece.gradient), begin, job.dtype);
  for (void*& state : piece.state) state = advance(state, begin, compute);
  piece.n = n;
  return piece;
}

Optimizer::~Optimizer() {
  for (HookHandle& hook : hooks_) hook.remove();
}

void Optimizer::add_group(const NamedTensors& parameters, const Attrs& options) {
  check(options);
  CHORALE_CHECK(!parameters.empty(), "[", name_, "] group ", groups_.size(), " has no parameters");
  std::unordered_set<std::string> names;
  std::unordered_set<const TensorImpl*> tensors;
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
    CHORALE_CHECK(tensor.device() == kCpu, "[", name_, "] parameter ", name, " is on ", tensor.device(),
                  "; expected cpu");
    CHORALE_CHECK(is_dense(tensor.sizes(), tensor.strides()), "[", name_, "] parameter ", name, " of shape ",
                  tensor.sizes(), " has holes or overlaps in memory; make it contiguous first");
    parameters_.push_back({.name = name, .tensor = tensor, .group = groups_.size()});
  }
  groups_.push_back({.options = options, .states = states(options)});
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
  const FieldValue value = options.at(field_called(options, name));
  return std::holds_alternative<bool>(value) ? static_cast<double>(std::get<bool>(value)) : std::get<double>(value);
}

void Optimizer::set_field(Attrs& options, const kernel::Field& field, double value) {
  if (field.kind == FieldKind::kBool) {
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

void Optimizer::step() {
  const trace::Span span("optimizer");
  const NoGrad quiet;
  start_batch();
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    if (const Tensor gradient = chorale::gradient(parameters_[i].tensor); gradient.defined()) add_to_batch(i, gradient);
    parameters_[i].updated = false;
  }
  finish_batch();
}

Tensor Optimizer::step(const std::function<Tensor()>& closure) {
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
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
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
  start_batch();
  add_to_batch(i, chorale::gradient(parameter.tensor));
  finish_batch();
  parameter.updated = true;
  set_gradient(parameter.tensor, {});
}

void Optimizer::start_batch() {
  batch_.parameters.clear();
  batch_.jobs.clear();
  batch_.recipes.clear();
  batch_.elems = 0;
  for (Group& group : groups_) group.recipe_step = -1;
}

void Optimizer::fit_states(Parameter& parameter) const {
  const Group& group = groups_[parameter.group];
  const Tensor& tensor = parameter.tensor;
  const DType compute = compute_of(tensor.dtype());
  // A parameter may have been given another dtype or layout since the last step; its states follow.
  const auto fit = [&](Tensor& state, double initial) {
    if (state.defined() && state.dtype() == compute && state.strides() == tensor.strides()) return;
    Tensor fresh = Tensor::empty_strided(tensor.sizes(), tensor.strides(), compute);
    if (state.defined()) {
      copy_(fresh, state);
    } else {
      fill_(fresh, initial);
    }
    state = std::move(fresh);
  };
  for (size_t s = 0; s < kMaxStates; ++s) {
    if (group.states[s]) fit(parameter.state[s], initial_state(group.options));
  }
  // A new master is taken from the parameter by the next step, because NaN rounds to no parameter (vec/update.h).
  if (is_half(tensor.dtype())) fit(parameter.master, std::numeric_limits<double>::quiet_NaN());
}

void Optimizer::add_to_batch(uint32_t i, const Tensor& gradient) {
  Parameter& parameter = parameters_[i];
  Group& group = groups_[parameter.group];
  const Tensor& tensor = parameter.tensor;
  CHORALE_CHECK(gradient.dtype() == tensor.dtype() && gradient.sizes() == tensor.sizes(), "[", name_,
                "] the gradient of ", parameter.name, " is ", gradient.dtype(), " ", gradient.sizes(), "; expected ",
                tensor.dtype(), " ", tensor.sizes());
  fit_states(parameter);
  batch_.parameters.push_back(i);
  if (group.recipe_step != parameter.steps + 1) {
    group.recipe_step = parameter.steps + 1;
    group.recipe = static_cast<uint32_t>(batch_.recipes.size());
    batch_.recipes.push_back(recipe(group.options, group.recipe_step));
  }
  vec::UpdateSpan span;
  const bool half = is_half(tensor.dtype());
  span.weight = half ? parameter.master.raw() : tensor.raw();
  span.rounded = half ? tensor.raw() : nullptr;
  for (size_t s = 0; s < kMaxStates; ++s) {
    if (group.states[s]) span.state[s] = parameter.state[s].raw();
  }
  if (gradient.is_sparse()) {
    add_sparse(parameter, gradient, span, group.recipe);
    return;
  }
  Tensor dense = gradient;
  if (gradient.strides() != tensor.strides() && !(gradient.is_contiguous() && tensor.is_contiguous())) {
    dense = Tensor::empty_strided(tensor.sizes(), tensor.strides(), tensor.dtype());
    copy_(dense, gradient);
    batch_.kept.push_back(dense);
  }
  span.gradient = dense.raw();
  span.n = tensor.elems();
  push(span, tensor.dtype(), group.recipe);
}

void Optimizer::add_sparse(const Parameter& parameter, const Tensor& gradient, const vec::UpdateSpan& span,
                           uint32_t recipe) {
  CHORALE_CHECK(takes_sparse(groups_[parameter.group].options), "[", name_, "] parameter ", parameter.name,
                " has a sparse gradient, which these options cannot use without touching every element: ",
                groups_[parameter.group].options,
                "; take Adagrad or Sgd without momentum and weight decay, or ask for a dense gradient");
  const Tensor sorted = coalesce(gradient);
  const Tensor rows = sorted.sparse().indices, values = contiguous(sorted.sparse().values);
  CHORALE_CHECK(rows.size(0) == 1 && parameter.tensor.is_contiguous(), "[", name_, "] the sparse gradient of ",
                parameter.name, " must be sparse in its first dimension only, and the parameter contiguous");
  batch_.kept.push_back(values);
  const int64_t width = parameter.tensor.elems() / std::max<int64_t>(parameter.tensor.size(0), 1);
  const std::vector<int64_t> at = rows.to_vector<int64_t>();
  const Job whole{span, values.dtype(), recipe, 0};
  for (size_t r = 0; r < at.size(); ++r) {
    CHORALE_CHECK(at[r] >= 0 && at[r] < parameter.tensor.size(0), "[", name_, "] the sparse gradient of ",
                  parameter.name, " has row ", at[r], "; there are ", parameter.tensor.size(0));
    vec::UpdateSpan row = piece_of(whole, at[r] * width, width);
    row.gradient = advance(values.raw(), static_cast<int64_t>(r) * width, values.dtype());
    push(row, values.dtype(), recipe);
  }
}

void Optimizer::push(const vec::UpdateSpan& span, DType dtype, uint32_t recipe) {
  batch_.jobs.push_back({span, dtype, recipe, batch_.elems});
  batch_.elems += span.n;
}

void Optimizer::finish_batch() {
  // Everything is known to be in order before the first byte changes.
  for (uint32_t i : batch_.parameters) parameters_[i].tensor.storage()->check_writable(name_);
  run(batch_);
  for (uint32_t i : batch_.parameters) {
    ++parameters_[i].steps;
    parameters_[i].tensor.storage()->note_write(name_);
  }
  batch_.kept.clear();
}

void Optimizer::run(Batch& batch) const {
  parallel_for(batch.elems, kGrainElems, [&](int64_t begin, int64_t end) {
    auto job = std::upper_bound(batch.jobs.begin(), batch.jobs.end(), begin,
                                [](int64_t at, const Job& j) { return at < j.begin; }) -
               1;
    for (; job != batch.jobs.end() && job->begin < end; ++job) {
      const Recipe& recipe = batch.recipes[job->recipe];
      const int64_t first = std::max<int64_t>(begin - job->begin, 0);
      const int64_t n = std::min(end - job->begin, job->span.n) - first;
      vec::update_loop(recipe.rule, job->dtype)(piece_of(*job, first, n), recipe.params);
    }
  });
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
    result.emplace_back(state_key(parameter.name, "step"), Tensor::scalar(parameter.steps, DType::kI64));
    if (parameter.steps == 0) continue;
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
    const auto load = [&](const char* name) {
      const Tensor found = reader.tensor(state_key(parameter.name, name), tensor.sizes());
      if (!found.defined()) return Tensor{};
      Tensor own = Tensor::empty_strided(tensor.sizes(), tensor.strides(), compute_of(tensor.dtype()));
      copy_(own, found);
      return own;
    };
    parameter.steps = reader.whole_number(state_key(parameter.name, "step"));
    parameter.updated = false;
    parameter.master = {};
    parameter.state = {};
    if (parameter.steps == 0) continue;
    const StateNames& names = groups[parameter.group].states;
    for (size_t s = 0; s < kMaxStates; ++s) {
      if (names[s]) parameter.state[s] = load(names[s]);
    }
    if (is_half(tensor.dtype())) parameter.master = load("master");
  }
  reader.finish();
  for (const Group& group : groups) check(group.options);
  groups_ = std::move(groups);
  parameters_ = std::move(parameters);
}

}  // namespace chorale::optim
