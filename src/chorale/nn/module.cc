#include "chorale/nn/module.h"

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "chorale/api/api.h"
#include "chorale/sharding/sharded.h"

namespace chorale::nn {
namespace {

struct Members final : MemberVisitor {
  std::vector<std::pair<std::string, Parameter*>> parameters;
  std::vector<std::pair<std::string, Buffer*>> buffers;
  std::vector<std::pair<std::string, Module*>> modules;

  // A module that is const consists of the same members; only what tensors hold can change through the result.
  explicit Members(const Module& of) {
    const_cast<Module&>(of).visit_members(*this);
    check_all_listed(of);
  }
  void parameter(const std::string& name, Parameter& member) override { parameters.emplace_back(name, &member); }
  void buffer(const std::string& name, Buffer& member) override { buffers.emplace_back(name, &member); }
  void module(const std::string& name, Module& member) override { modules.emplace_back(name, &member); }
  void unlisted(const void* begin, size_t bytes) override { left_out_.push_back({begin, bytes}); }

 private:
  bool is_listed(const detail::Place& place) const {
    const auto is_inside = [&](const Extent& extent) {
      return !std::less<>()(place.at, extent.begin) &&
             std::less<>()(place.at, static_cast<const std::byte*>(extent.begin) + extent.bytes);
    };
    const auto is_at = [&](const auto& entry) { return entry.second == place.at; };
    const auto is_module_at = [&](const auto& entry) {
      return static_cast<const detail::ModulePlace*>(entry.second) == place.at;
    };
    return std::any_of(parameters.begin(), parameters.end(), is_at) ||
           std::any_of(buffers.begin(), buffers.end(), is_at) ||
           std::any_of(modules.begin(), modules.end(), is_module_at) ||
           std::any_of(modules.begin(), modules.end(),
                       [&](const auto& entry) { return is_inside(entry.second->extent()); }) ||
           std::any_of(left_out_.begin(), left_out_.end(), is_inside);
  }

  void check_all_listed(const Module& of) const {
    const Extent extent = of.extent();
    if (!extent.lists_all) return;
    for (const detail::Place& place : detail::places_in(extent.begin, extent.bytes)) {
      if (place.at == static_cast<const detail::ModulePlace*>(&of) || is_listed(place)) continue;
      const bool is_module = place.kind == detail::PlaceKind::kModule;
      const auto* tensor = is_module ? nullptr
                           : place.kind == detail::PlaceKind::kParameter
                               ? static_cast<const Tensor*>(static_cast<const Parameter*>(place.at))
                               : static_cast<const Buffer*>(place.at);
      if (tensor && !tensor->defined()) continue;  // absent: a bias that was not wanted
      const std::string what =
          is_module
              ? concat("a ", static_cast<const Module*>(static_cast<const detail::ModulePlace*>(place.at))->type_name())
              : concat(place.kind == detail::PlaceKind::kParameter ? "a Parameter " : "a Buffer ", tensor->dtype(), " ",
                       tensor->sizes());
      throw StateError(
          concat("[", of.type_name(), "] has ", what, after_which(place.at),
                 " that its CHORALE_MODULE does not list: it would be neither trained nor saved. List it "
                 "(a derived module lists the members of its base too), or say nn::unlisted(member) there"));
    }
  }

  // " behind fc1": the listed member that stands before it in memory.
  std::string after_which(const void* at) const {
    const void* nearest = nullptr;
    std::string name;
    const auto look = [&](const auto& members) {
      for (const auto& [its_name, member] : members) {
        if (std::less<const void*>()(member, at) && !std::less<const void*>()(member, nearest)) {
          nearest = member;
          name = its_name;
        }
      }
    };
    look(parameters);
    look(buffers);
    look(modules);
    return nearest ? " behind " + name : "";
  }

  std::vector<Extent> left_out_;
};

// A wrapper's member without a name has the wrapper's.
std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() || name.empty() ? prefix + name : prefix + "." + name;
}

// Calls fn(prefix, module) for a module and all below it, owners first, each once per name.
template <class Fn>
void walk(const Module& module, const std::string& prefix, const Fn& fn) {
  module.need_whole();
  const Members members(module);
  fn(prefix, members);
  for (const auto& [name, member] : members.modules) walk(*member, joined(prefix, name), fn);
}

// Keeps the first entry of every tensor.
NamedTensors without_repeats(NamedTensors tensors) {
  std::unordered_set<const Tensor::Impl*> seen;
  std::erase_if(tensors, [&](const auto& entry) { return !seen.insert(entry.second.impl()).second; });
  return tensors;
}

// Called before tensors are read or changed as a state: a layer above may have others in their places for a while.
void prepare_state(const Module& module) {
  if (module.extension()) module.extension()->before_state();
  for (const auto& [name, member] : Members(module).modules) prepare_state(*member);
}

// Calls fn for every parameter and buffer, each once.
template <class Fn>
void for_each_tensor(const Module& module, const Fn& fn) {
  prepare_state(module);
  for (const auto& [name, parameter] : module.named_parameters()) fn(parameter);
  for (const auto& [name, buffer] : module.named_buffers()) fn(buffer);
}

}  // namespace

void Module::raise_moved_from() const {
  throw InvalidArgument(concat("[", type_name(),
                               "] the module was moved from: its parameters, buffers and layers are "
                               "those of another now"));
}

NamedTensors Module::named_parameters() const {
  NamedTensors found;
  walk(*this, "", [&](const std::string& prefix, const Members& members) {
    for (const auto& [name, member] : members.parameters) found.emplace_back(joined(prefix, name), *member);
  });
  return without_repeats(std::move(found));
}

std::vector<Tensor> Module::parameters() const {
  std::vector<Tensor> found;
  for (auto& [name, parameter] : named_parameters()) found.push_back(std::move(parameter));
  return found;
}

NamedTensors Module::named_buffers() const {
  NamedTensors found;
  walk(*this, "", [&](const std::string& prefix, const Members& members) {
    for (const auto& [name, member] : members.buffers) found.emplace_back(joined(prefix, name), *member);
  });
  return without_repeats(std::move(found));
}

NamedModules Module::named_modules() {
  NamedModules found = {{"", this}};
  for (size_t i = 0; i < found.size(); ++i) {
    // Behind its owner come its members, before what the owner has behind it: the order of the other lists.
    const Members members(*found[i].second);
    NamedModules below;
    for (const auto& [name, member] : members.modules) below.emplace_back(joined(found[i].first, name), member);
    found.insert(found.begin() + static_cast<std::ptrdiff_t>(i) + 1, below.begin(), below.end());
  }
  std::unordered_set<const Module*> seen;
  std::erase_if(found, [&](const auto& entry) { return !seen.insert(entry.second).second; });
  return found;
}

int64_t Module::parameter_count() const {
  int64_t count = 0;
  for (const Tensor& parameter : parameters()) count += parameter.elems();
  return count;
}

NamedTensors Module::state_dict() const {
  prepare_state(*this);
  NamedTensors state;
  walk(*this, "", [&](const std::string& prefix, const Members& members) {
    for (const auto& [name, member] : members.parameters) state.emplace_back(joined(prefix, name), detach(*member));
    for (const auto& [name, member] : members.buffers) {
      if (member->persistent()) state.emplace_back(joined(prefix, name), detach(*member));
    }
  });
  return state;
}

namespace {
void append_list(std::string& text, const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return;
  text += concat("\n  ", what, " (", names.size(), "):");
  for (const std::string& name : names) text += "\n    " + name;
}
}  // namespace

LoadReport Module::load_state_dict(const NamedTensors& state, bool strict) {
  std::unordered_map<std::string, const Tensor*> given;
  for (const auto& [name, value] : state) {
    CHORALE_CHECK(value.defined(), "[load_state_dict] ", name, " is an undefined tensor");
    CHORALE_CHECK(given.emplace(name, &value).second, "[load_state_dict] ", name, " is there twice");
  }
  // Tensors of one storage and place are one tensor: state_dict() gives each name a handle of its own.
  const NamedTensors own = state_dict();
  const auto place = [](const Tensor& x) { return std::pair(x.storage().get(), x.offset()); };
  LoadReport report;
  std::vector<std::string> mismatched;
  std::vector<std::pair<Tensor, const Tensor*>> copies;
  for (const auto& [name, mine] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      const bool known_otherwise = std::any_of(own.begin(), own.end(), [&, &tensor = mine](const auto& other) {
        return place(other.second) == place(tensor) && given.contains(other.first);
      });
      if (!known_otherwise) report.missing.push_back(name);
      continue;
    }
    const Tensor& value = *found->second;
    if (value.sizes() != mine.sizes()) {
      mismatched.push_back(concat(name, ": expected ", mine.sizes(), ", found ", value.sizes()));
    } else {
      copies.emplace_back(mine, &value);
    }
  }
  std::unordered_set<std::string> names;
  for (const auto& [name, mine] : own) names.insert(name);
  for (const auto& [name, value] : state) {
    if (!names.contains(name)) report.unexpected.push_back(name);
  }
  if (!mismatched.empty() || (strict && !(report.missing.empty() && report.unexpected.empty()))) {
    std::string text;
    if (strict) append_list(text, "missing", report.missing);
    if (strict) append_list(text, "unexpected", report.unexpected);
    append_list(text, "shapes that differ", mismatched);
    throw InvalidArgument(concat("[load_state_dict] the state does not fit ", type_name(), ":", text,
                                 mismatched.empty() ? "\n  pass strict = false to load what fits" : ""));
  }
  const NoGrad quiet;
  for (const auto& [mine, value] : copies) {
    const bool is_cut = mine.is_sharded() && !value->is_sharded();  // a whole value: every rank takes its part
    copy_(mine, is_cut ? distribute(detach(*value), mesh_of(mine), placements_of(mine), std::nullopt) : *value);
  }
  return report;
}

void Module::to(DType dtype) {
  CHORALE_CHECK(is_differentiable(dtype), "[Module::to] parameters are floating or complex, not ", dtype);
  const NoGrad quiet;
  for_each_tensor(*this, [&](const Tensor& x) {
    if (!is_differentiable(x.dtype()) || x.dtype() == dtype) return;
    const Tensor gradient_then = gradient(x);
    set_data(x, chorale::to(x, dtype));
    if (gradient_then.defined()) set_gradient(x, chorale::to(gradient_then, dtype));
  });
}

void Module::to(Device device) {
  const NoGrad quiet;
  for_each_tensor(*this, [&](const Tensor& x) {
    if (x.device() == device) return;
    CHORALE_CHECK(x.device().type != DeviceType::kNull, "[Module::to] cannot move from ", x.device(), " to ", device,
                  ": the values are not there; call materialize() and fill it");
    const Tensor gradient_then = gradient(x);
    set_gradient(x, {});
    if (device.type == DeviceType::kNull) return set_data(x, Tensor::empty(x.sizes(), x.dtype(), device));
    set_data(x, chorale::to(x, device));
    if (gradient_then.defined()) set_gradient(x, chorale::to(gradient_then, device));
  });
}

void Module::materialize(Device device) {
  for_each_tensor(*this, [&](const Tensor& x) {
    if (x.device().type != DeviceType::kNull) return;
    set_gradient(x, {});
    if (!x.is_sharded()) return set_data(x, Tensor::empty(x.sizes(), x.dtype(), device));
    const sharding::Sharded& known = sharding::sharded(x);
    set_data(
        x, sharding::wrap(known.layout, x.sizes(), x.strides(), Tensor::empty(known.local.sizes(), x.dtype(), device)));
  });
  to(device);
}

void Module::train(bool on) {
  need_whole();
  for (const auto& [name, module] : named_modules()) module->training_.set(on ? 1 : 0);
}

void Module::apply(const std::function<void(Module&)>& fn) {
  CHORALE_CHECK(fn, "[", type_name(), "] apply() was given an empty function");
  std::unordered_set<const Module*> seen;
  const std::function<void(Module&)> visit = [&](Module& module) {
    if (!seen.insert(&module).second) return;
    for (const auto& [name, member] : Members(module).modules) visit(*member);
    fn(module);
  };
  visit(*this);
}

void Module::requires_grad_(bool wanted) {
  for (const Tensor& parameter : parameters()) set_requires_grad(parameter, wanted);
}

void Module::zero_grad(bool to_none) {
  for (const Tensor& parameter : parameters()) {
    const Tensor current = gradient(parameter);
    if (!current.defined()) continue;
    if (to_none) {
      set_gradient(parameter, {});
    } else {
      const NoGrad quiet;
      zero_(current);
    }
  }
}

namespace {
// Gives every handle a tensor of its own, and equal handles the same one.
struct Separate final : MemberVisitor {
  std::unordered_map<const Tensor::Impl*, Tensor> tensors;
  std::unordered_map<const void*, std::shared_ptr<void>> pointers;

  Tensor copy_of(const Tensor& x) {
    const auto [entry, added] = tensors.try_emplace(x.impl());
    if (!added) return entry->second;
    const NoGrad quiet;
    const Tensor copy = chorale::clone(x);
    entry->second = copy;
    tensors[copy.impl()] = copy;  // a module behind two shared pointers is visited twice
    return copy;
  }
  void parameter(const std::string&, Parameter& member) override {
    member = Parameter(copy_of(member), requires_grad(member));
  }
  void buffer(const std::string&, Buffer& member) override { member = Buffer(copy_of(member), member.persistent()); }
  void module(const std::string&, Module& member) override { member.visit_members(*this); }
  std::shared_ptr<void> shared(const void* member, const std::function<std::shared_ptr<void>()>& copy) override {
    auto& replacement = pointers[member];
    if (!replacement) replacement = copy();
    return replacement;
  }
};
}  // namespace

void separate_tensors(Module& copy) {
  for (const auto& [name, module] : copy.named_modules()) {
    if (module->extension()) module->extension()->before_clone();
  }
  Separate separate;
  copy.visit_members(separate);
}

namespace {
void print(std::ostream& out, const Module& module, const std::string& indent) {
  module.need_whole();
  const Members members(module);
  out << module.type_name() << "(" << module.describe();
  for (const auto& [name, member] : members.modules) {
    out << "\n" << indent << "  ";
    if (!name.empty()) out << "(" << name << "): ";
    print(out, *member, indent + "  ");
  }
  if (!members.modules.empty()) out << "\n" << indent;
  out << ")";
  if (const int64_t count = module.parameter_count()) out << "  # " << count;
}
}  // namespace

std::ostream& operator<<(std::ostream& out, const Module& module) {
  std::ostringstream text;  // all of it, or an error
  print(text, module, "");
  return out << text.str();
}

}  // namespace chorale::nn
