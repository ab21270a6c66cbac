#include "chorale/parallel/substitution.h"

#include <unordered_map>

#include "chorale/base/error.h"

namespace chorale::parallel {
namespace {

// Finds members by their dotted names.
struct ByName final : nn::MemberVisitor {
  ByName(Substitution& to, std::unordered_map<std::string, Tensor>& replacements) : scope(to), others(replacements) {}
  Substitution& scope;
  std::unordered_map<std::string, Tensor>& others;
  std::string path;  // with a dot behind it, unless empty

  void member(const std::string& name, Tensor& tensor) {
    const auto found = others.find(path + name);
    if (found == others.end()) return;
    scope.replace(tensor, found->second);
    others.erase(found);
  }
  void parameter(const std::string& name, nn::Parameter& tensor) override { member(name, tensor); }
  void buffer(const std::string& name, nn::Buffer& tensor) override { member(name, tensor); }
  void module(const std::string& name, nn::Module& inner) override {
    const size_t length = path.size();
    path += name + ".";
    inner.visit_members(*this);
    path.resize(length);
  }
};

}  // namespace

Substitution::Substitution(nn::Module& module, const NamedTensors& others) {
  std::unordered_map<std::string, Tensor> left(others.begin(), others.end());
  ByName visitor(*this, left);
  try {
    module.visit_members(visitor);
    CHORALE_CHECK(left.empty(), "[substitute] ", module.type_name(), " has no parameter or buffer ",
                  left.begin()->first);
  } catch (...) {
    undo();
    throw;
  }
}

void Substitution::replace(Tensor& member, const Tensor& other) {
  CHORALE_CHECK(other.defined() && other.sizes() == member.sizes(), "[substitute] a tensor of shape ", member.sizes(),
                " cannot be replaced by one of another shape");
  put(member, other);
}

void Substitution::put(Tensor& member, const Tensor& other) {
  before_.emplace_back(&member, member);
  member = other;
}

void Substitution::undo() {
  for (auto& [member, tensor] : before_) *member = std::move(tensor);
  before_.clear();
}

}  // namespace chorale::parallel
