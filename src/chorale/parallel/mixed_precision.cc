#include "chorale/parallel/mixed_precision.h"

#include "chorale/api/api.h"
#include "chorale/base/error.h"

namespace chorale::parallel {
namespace {

struct Parameters final : nn::MemberVisitor {
  std::vector<std::pair<std::string, nn::Parameter*>> found;
  std::string path;
  void parameter(const std::string& name, nn::Parameter& member) override { found.emplace_back(path + name, &member); }
  void buffer(const std::string&, nn::Buffer&) override {}
  void module(const std::string& name, nn::Module& member) override {
    const size_t length = path.size();
    path += name + ".";
    member.visit_members(*this);
    path.resize(length);
  }
};

}  // namespace

MixedParameters::MixedParameters(nn::Module& module, const MixedPrecision& precision,
                                 std::unordered_set<std::string> ignored)
    : module_(module), precision_(precision), ignored_(std::move(ignored)) {
  for (const auto& dtype : {precision.parameters, precision.reduce, precision.buffers}) {
    CHORALE_CHECK(!dtype || is_floating(*dtype), "[ddp] mixed precision needs floating dtypes, not ",
                  dtype.value_or(DType::kF32));
  }
  const NoGrad quiet;
  if (precision.buffers) {
    for (const auto& [name, buffer] : module.named_buffers()) {
      if (is_floating(buffer.dtype()) && !ignored_.contains(name)) set_data(buffer, to(buffer, *precision.buffers));
    }
  }
  Substitution scope;
  enter(scope);
}

void MixedParameters::enter(Substitution& scope) {
  if (!precision_.parameters) return;
  entries_.clear();
  Parameters parameters;
  module_.visit_members(parameters);
  std::unordered_map<const Tensor::Impl*, size_t> known;  // one shadow for a shared parameter
  for (const auto& [name, member] : parameters.found) {
    if (!is_floating(member->dtype()) || ignored_.contains(name)) continue;
    const auto [entry, added] = known.try_emplace(member->impl(), entries_.size());
    // The gradient of the shadow comes back through the cast: in the master's dtype.
    if (added) entries_.push_back({name, *member, to(*member, *precision_.parameters)});
    scope.replace(*member, entries_[entry->second].shadow);
  }
}

void MixedParameters::cast(Tensor& input) const {
  if (precision_.parameters && is_floating(input.dtype())) input = to(input, *precision_.parameters);
}

}  // namespace chorale::parallel
