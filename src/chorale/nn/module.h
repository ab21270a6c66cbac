// A module: parameters, buffers and further modules, and a forward that computes with them.
//
//   struct Net : nn::Module {
//     nn::Linear fc1{20, 32}, fc2{32, 10};
//     CHORALE_MODULE(Net, fc1, fc2)
//     Tensor forward(const Tensor& x) { return fc2(relu(fc1(x))); }
//   };
//
// Modules are plain values: they can be moved, put into containers and be members of others. CHORALE_MODULE lists the
// members once; names in a state dict come from it ("fc1.weight"), and are PyTorch's where a layer is PyTorch's.
// A member is a Parameter, a Buffer, a module, or a vector, array, optional, pointer or map of strings to these
// ("layers.0.weight"); nn::named("other", member) gives it another name than the variable's.
// A parameter, buffer or module that is a member and is not listed is an error when the module is first asked what it
// consists of: it would be neither saved nor trained. nn::unlisted(member) in the list says that this is meant. A
// derived module lists the members of its base too. (What a container or a pointer holds is not found out.)
// Copying a module copies handles: both have the same tensors then. clone(module) makes new ones. One that was moved
// from is an error when it is called, or asked for its tensors, until it is assigned to.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chorale/autograd/function.h"
#include "chorale/graph/host_value.h"
#include "chorale/nn/call.h"
#include "chorale/nn/hooks.h"
#include "chorale/nn/members.h"
#include "chorale/nn/parameter.h"
#include "chorale/op/copy.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::nn {

// Tensors come in the order of the modules, a module's own before those of its members.
using NamedModules = std::vector<std::pair<std::string, Module*>>;

// What load_state_dict could not match, when it was not strict.
struct LoadReport {
  std::vector<std::string> missing;     // in the module only
  std::vector<std::string> unexpected;  // in the state dict only
};

// What a layer above keeps with a module: it moves with the module, and a copy of the module shares it.
class ModuleExtension {
 public:
  virtual ~ModuleExtension() = default;
  // The module's tensors are about to be read, loaded, cast or moved, as a state.
  virtual void before_state() = 0;
  // Throws if the module cannot be cloned.
  virtual void before_clone() const = 0;
};

// Whether the members went to another module. Many layers work without weights too (a norm, a list of layers), so that
// they would go on quietly.
class MovedFrom {
 public:
  MovedFrom() = default;
  MovedFrom(const MovedFrom&) = default;
  MovedFrom& operator=(const MovedFrom&) = default;
  MovedFrom(MovedFrom&& other) noexcept : value_(std::exchange(other.value_, true)) {}
  MovedFrom& operator=(MovedFrom&& other) noexcept {
    const bool value = std::exchange(other.value_, true);
    value_ = value;
    return *this;
  }
  explicit operator bool() const { return value_; }

 private:
  bool value_ = false;
};

// The memory of a module, and whether everything in it is to be listed.
struct Extent {
  const void* begin = nullptr;
  size_t bytes = 0;
  bool lists_all = false;
};

class Module : public detail::ModulePlace {
 public:
  virtual ~Module() = default;

  // ---- what it consists of; a tensor or module known under several names is listed once, under the first

  std::vector<Tensor> parameters() const;
  NamedTensors named_parameters() const;
  NamedTensors named_buffers() const;
  NamedModules named_modules();  // itself first, under the name ""
  int64_t parameter_count() const;

  // ---- saving and loading

  // Parameters and persistent buffers under all their names, without history: the bytes are the module's own.
  NamedTensors state_dict() const;
  // Copies values into the module's tensors, converting dtypes. One error lists all names that are missing or
  // unexpected (if strict) and all shapes that differ, and nothing is written then. A tensor with several names needs
  // only one of them.
  LoadReport load_state_dict(const NamedTensors& state, bool strict = true);

  // Throws InvalidArgument when the module was moved from.
  void need_whole() const {
    if (moved_from_) [[unlikely]]
      raise_moved_from();
  }

  // ---- changing all of it

  // Floating (and complex) parameters, buffers and gradients; every holder of a parameter sees the change.
  void to(DType dtype);
  // Parameters, buffers and gradients. To the null device only shapes go; nothing comes back from there but by
  // materialize().
  void to(Device device);
  // Memory on `device`, not yet filled, for what is on the null device; the rest moves there.
  void materialize(Device device);
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return training_.read("whether a module trains") != 0; }
  // Calls fn for every module, members before their owners.
  void apply(const std::function<void(Module&)>& fn);
  void requires_grad_(bool wanted = true);
  // Sets gradients to none, or to zeros in place.
  void zero_grad(bool to_none = true);

  // ---- functions around its call (hooks.h)

  HookHandle before_forward(ForwardPreHook hook) { return hooks_.add(std::move(hook)); }
  HookHandle after_forward(ForwardHook hook) { return hooks_.add(std::move(hook)); }
  HookHandle before_backward(BackwardPreHook hook) { return hooks_.add(std::move(hook)); }
  HookHandle after_backward(BackwardHook hook) { return hooks_.add(std::move(hook)); }
  const Hooks& hooks() const { return hooks_; }
  const std::shared_ptr<ModuleExtension>& extension() const { return extension_; }
  void set_extension(std::shared_ptr<ModuleExtension> extension) { extension_ = std::move(extension); }

  // ---- what CHORALE_MODULE writes, and what a layer may add for printing: "20, 32, bias=false"

  virtual const char* type_name() const = 0;
  virtual void visit_members(MemberVisitor& visitor) = 0;
  virtual Extent extent() const { return {}; }
  virtual std::string describe() const { return {}; }

 protected:
  // The functions, which forward would not see behind the members of these names.
  static Tensor to(const Tensor& x, DType dtype) { return chorale::to(x, dtype); }
  template <class F, class... Args>
  requires std::is_base_of_v<Function, F>
  static std::vector<Tensor> apply(const std::vector<Tensor>& in, Args&&... args) {
    return chorale::apply<F>(in, std::forward<Args>(args)...);
  }

  Module() = default;
  Module(const Module&) = default;
  Module(Module&&) = default;
  Module& operator=(const Module&) = default;
  Module& operator=(Module&&) = default;

 private:
  [[noreturn]] void raise_moved_from() const;

  Hooks hooks_;
  std::shared_ptr<ModuleExtension> extension_;
  graph::HostValue training_{1};
  MovedFrom moved_from_;
};

// The tree of modules with their parameter counts.
std::ostream& operator<<(std::ostream& out, const Module& module);

// A module of the same values in memory of its own. What was shared inside (a tied weight, a module behind two shared
// pointers) is shared in the copy. Gradients are not copied.
void separate_tensors(Module& copy);
template <class M>
requires std::is_base_of_v<Module, M> M clone(const M& module) {
  M copy = module;
  separate_tensors(copy);
  return copy;
}

}  // namespace chorale::nn

// What every module has: the members it lists, the name of its type, and the call that runs hooks around forward.
#define CHORALE_MODULE(Type, ...)                                            \
 public:                                                                     \
  void visit_members([[maybe_unused]] ::chorale::nn::MemberVisitor& visitor) \
      override{CHORALE_FOR_EACH(CHORALE_VISIT_MEMBER, __VA_ARGS__)} CHORALE_MODULE_PARTS(Type, true)
#define CHORALE_VISIT_MEMBER(member) ::chorale::nn::visit_member(visitor, #member, member);
// A module that writes visit_members by hand uses this.
#define CHORALE_MODULE_CALL(Type) CHORALE_MODULE_PARTS(Type, false)
#define CHORALE_MODULE_PARTS(Type, lists_all)                                                \
  const char* type_name() const override { return #Type; }                                   \
  ::chorale::nn::Extent extent() const override { return {this, sizeof(*this), lists_all}; } \
  template <class... Args>                                                                   \
  auto operator()(Args&&... args) {                                                          \
    return ::chorale::nn::call(*this, std::forward<Args>(args)...);                          \
  }                                                                                          \
  template <class... Args>                                                                   \
  requires ::chorale::nn::ForwardIsConst<Type, Args...>                                      \
  auto operator()(Args&&... args) const { return ::chorale::nn::call(*this, std::forward<Args>(args)...); }
