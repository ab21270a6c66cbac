// Saving and loading the state of an optimizer.
#include "chorale/op/copy.h"
#include "chorale/optim/optimizer.h"
#include "chorale/optim/state_reader.h"

namespace chorale::optim {
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
