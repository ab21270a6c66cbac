#include "chorale/train/finite_watch.h"

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/sharding/sharded.h"

namespace chorale::train {

bool is_finite(const Tensor& x) {
  if (!x.defined() || !is_floating(x.dtype())) return true;
  const NoGrad scope;
  // This rank looks at its own part of a sharded tensor, and asks nobody.
  if (x.is_sharded()) return is_finite(to_local(x));
  return all(isfinite(x)).item<bool>();
}

FiniteWatch::FiniteWatch(nn::Module& model) {
  for (const auto& [name, tensor] : model.named_parameters()) look_at({tensor}, concat("parameter ", name, " itself"));
  for (const auto& [name, tensor] : model.named_buffers()) look_at({tensor}, concat("buffer ", name, " itself"));
  for (const auto& [name, module] : model.named_modules()) {
    const std::string layer = name.empty() ? concat("the model (", module->type_name(), ")")
                                           : concat("layer ", name, " (", module->type_name(), ")");
    hooks_.push_back(module->after_forward([this, layer](nn::Module&, const auto&, std::vector<Tensor>& outputs) {
      look_at(outputs, "the output of " + layer);
    }));
    // Members come before their owners in backward as well: the first that is noted is the innermost.
    hooks_.push_back(
        module->after_backward([this, layer](std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) {
          look_at(outputs, concat("the gradient that reaches ", layer));
          look_at(inputs, concat("the gradient that ", layer, " passes on"));
        }));
  }
}

FiniteWatch::~FiniteWatch() {
  for (HookHandle& hook : hooks_) hook.remove();
}

void FiniteWatch::look_at(const std::vector<Tensor>& tensors, const std::string& what) {
  if (first_.empty() && !std::all_of(tensors.begin(), tensors.end(), is_finite)) first_ = what;
}

}  // namespace chorale::train
