// Saving and loading the state of an optimizer.
#include <cstdint>
#include <set>

#include "chorale/op/copy.h"
#include "chorale/optim/optimizer.h"

namespace chorale::optim {
namespace {

std::string group_key(size_t group, const char* option) { return concat("groups/", group, "/", option); }
std::string state_key(const std::string& parameter, const char* state) {
  return concat("state/", parameter, "/", state);
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kShown ? concat(text, " and ", names.size() - kShown, " more") : text;
}

// What a state dict is asked for, so that afterwards we know what was missing and what nobody wanted.
class Reader {
 public:
  Reader(const char* optimizer, const StateDict& state) : optimizer_(optimizer), state_(state) {}

  bool has(const std::string& key) const { return state_.contains(key); }
  // The number there; 0 and a note when there is none.
  double number(const std::string& key) {
    const Tensor found = tensor(key, Shape{});
    return found.defined() ? found.item<double>() : 0;
  }
  // The tensor there; undefined and a note when there is none.
  Tensor tensor(const std::string& key, const Shape& sizes) {
    const auto found = state_.find(key);
    if (found == state_.end()) {
      missing_.push_back(key);
      return {};
    }
    wanted_.insert(key);
    CHORALE_CHECK(found->second.sizes() == sizes, "[", optimizer_, "] ", key, " has shape ", found->second.sizes(),
                  " in the state to load; expected ", sizes);
    return found->second;
  }
  void finish() const {
    std::vector<std::string> unexpected;
    for (const auto& [key, tensor] : state_) {
      if (!wanted_.contains(key)) unexpected.push_back(key);
    }
    CHORALE_CHECK(missing_.empty() && unexpected.empty(), "[", optimizer_,
                  "] the state to load is not that of these parameters and options; missing: ",
                  missing_.empty() ? "nothing" : listed(missing_),
                  "; unexpected: ", unexpected.empty() ? "nothing" : listed(unexpected));
  }

 private:
  const char* optimizer_;
  const StateDict& state_;
  std::vector<std::string> missing_;
  std::set<std::string> wanted_;
};

}  // namespace

StateDict Optimizer::state_dict() const {
  StateDict result;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const Field& field : groups_[g].options.type()->fields)
      result[group_key(g, field.name)] = Tensor::scalar(option(g, field.name), DType::kF64);
  }
  for (const Parameter& parameter : parameters_) {
    result[state_key(parameter.name, "step")] = Tensor::scalar(parameter.steps, DType::kI64);
    if (parameter.steps == 0) continue;
    const StateNames& names = groups_[parameter.group].states;
    for (size_t s = 0; s < kMaxStates; ++s) {
      if (names[s] && parameter.state[s].defined())
        result[state_key(parameter.name, names[s])] = clone(parameter.state[s]);
    }
    if (parameter.master.defined()) result[state_key(parameter.name, "master")] = clone(parameter.master);
  }
  return result;
}

Attrs Optimizer::loaded_options(size_t group, const StateDict& state) const {
  Attrs options = groups_[group].options;
  for (const Field& field : options.type()->fields) {
    const auto found = state.find(group_key(group, field.name));
    if (found == state.end()) continue;  // load_state_dict reports it
    const auto value = found->second.item<double>();
    if (field.kind == FieldKind::kBool) {
      options.set(field.name, value != 0);
    } else {
      options.set(field.name, value);
    }
  }
  return options;
}

void Optimizer::load_state_dict(const StateDict& state) {
  const NoGrad quiet;
  Reader reader(name_, state);
  std::vector<Group> groups = groups_;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const Field& field : groups[g].options.type()->fields) reader.number(group_key(g, field.name));
    groups[g].options = loaded_options(g, state);
    check(groups[g].options);
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
    parameter.steps = static_cast<int64_t>(reader.number(state_key(parameter.name, "step")));
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
  groups_ = std::move(groups);
  parameters_ = std::move(parameters);
}

}  // namespace chorale::optim
