#include "chorale/parallel/localized.h"

#include "chorale/api/api.h"
#include "chorale/op/builder.h"

namespace chorale::parallel {
namespace {

// Calls f(dotted name, tensor) for every parameter and buffer.
template <class F>
struct EachTensor final : nn::MemberVisitor {
  explicit EachTensor(F what) : f(std::move(what)) {}
  void parameter(const std::string& name, nn::Parameter& member) override { f(path + name, member); }
  void buffer(const std::string& name, nn::Buffer& member) override { f(path + name, member); }
  void module(const std::string& name, nn::Module& inner) override {
    const size_t length = path.size();
    path += name + ".";
    inner.visit_members(*this);
    path.resize(length);
  }
  F f;
  std::string path;
};

}  // namespace

Localized::Localized(nn::Module& module, const std::unordered_set<std::string>& ignored) {
  EachTensor visitor([&](const std::string& name, Tensor& tensor) {
    if (!tensor.is_sharded() || ignored.contains(name)) return;
    specs_[tensor.impl()] = {sharding::sharded(tensor).layout, tensor.sizes(), tensor.strides(), tensor};
    const Tensor part = sharding::local_of(tensor);
    op::current().set_data(tensor, part);
  });
  module.visit_members(visitor);
}

void Localized::enter(nn::Module& module, Substitution& scope) const {
  std::unordered_map<const Tensor::Impl*, Tensor> made;  // a tied weight stays one
  EachTensor visitor([&](const std::string&, Tensor& tensor) {
    const auto found = specs_.find(tensor.impl());
    if (found == specs_.end()) return;
    const Spec& spec = found->second;
    Tensor& whole = made[tensor.impl()];
    if (!whole.defined()) {
      whole = from_local(tensor, spec.layout->mesh, spec.layout->placements,
                         {.sizes = spec.sizes, .strides = spec.strides});
    }
    scope.put(tensor, whole);
  });
  module.visit_members(visitor);
}

Tensor Localized::sharded(const Tensor& local) const {
  const auto found = specs_.find(local.impl());
  if (found == specs_.end()) return local;
  const Spec& spec = found->second;
  const NoGrad quiet;
  return from_local(detach(local), spec.layout->mesh, spec.layout->placements,
                    {.sizes = spec.sizes, .strides = spec.strides});
}

}  // namespace chorale::parallel
