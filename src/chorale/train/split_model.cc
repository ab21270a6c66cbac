#include "chorale/train/split_model.h"

#include <string_view>
#include <unordered_map>

#include "chorale/api/api.h"
#include "chorale/parallel/plans.h"
#include "chorale/sharding/sharded.h"

namespace chorale::train {
namespace {

// A tensor of which this rank has `part`, placed as `like`.
Tensor placed_as(const Tensor& like, const Tensor& part) {
  const NoGrad quiet;
  return from_local(detach(part), mesh_of(like), placements_of(like),
                    {.sizes = like.sizes(), .strides = like.strides()});
}

Tensor whole_of(const Tensor& x) { return x.is_sharded() ? full_tensor(x) : x; }

}  // namespace

SplitModel::SplitModel(nn::Module& model, const TrainOptions& options, const JobRanks& ranks) : model_(model) {
  if (!ranks.is_split()) return;
  // Rank 0 may have read the model from a file. Styles that leave parameters whole take them to be equal everywhere.
  for (const NamedTensors& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& [name, tensor] : tensors) ranks.all().broadcast(tensor, 0).wait();
  }
  parallel::tensor_parallel(model, ranks.mesh()["tp"],
                            parallel::plan_for(model, {.sequence_parallel = options.sequence_parallel}));
  parts_ = parallel::Localized(model, {});
}

std::vector<Tensor> SplitModel::parameters() const {
  std::vector<Tensor> parameters = model_.parameters();
  for (Tensor& parameter : parameters) {
    const Tensor sharded = parts_.sharded(parameter);
    if (!sharded.is_sharded()) continue;
    if (const Tensor part = gradient(parameter); part.defined()) set_gradient(sharded, placed_as(sharded, part));
    parameter = sharded;
  }
  return parameters;
}

NamedTensors SplitModel::whole_model() const {
  NamedTensors wholes;
  for (const auto& [name, tensor] : model_.named_parameters())
    wholes.emplace_back(name, whole_of(parts_.sharded(tensor)));
  for (const auto& [name, tensor] : model_.named_buffers()) wholes.emplace_back(name, whole_of(parts_.sharded(tensor)));
  return wholes;
}

NamedTensors SplitModel::changed(
    const NamedTensors& states,
    const std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>& change) const {
  if (!is_split()) return states;
  constexpr std::string_view kPrefix = "state/";
  std::unordered_map<std::string, Tensor> parameters;
  for (const auto& [name, tensor] : model_.named_parameters()) parameters.emplace(name, tensor);
  NamedTensors result;
  for (const auto& [key, state] : states) {
    const size_t end = key.rfind('/');
    const auto found = key.starts_with(kPrefix) && end > kPrefix.size()
                           ? parameters.find(key.substr(kPrefix.size(), end - kPrefix.size()))
                           : parameters.end();
    const Tensor sharded = found == parameters.end() ? Tensor() : parts_.sharded(found->second);
    const bool is_part = sharded.defined() && sharded.is_sharded();
    result.emplace_back(key, is_part ? change(sharded, found->second, state) : state);
  }
  return result;
}

// Numbers, such as counts of steps, are the same on every rank.
NamedTensors SplitModel::whole_states(const NamedTensors& states) const {
  return changed(states, [](const Tensor& sharded, const Tensor& part, const Tensor& state) {
    return state.sizes() == part.sizes() ? whole_of(placed_as(sharded, state)) : state;
  });
}

NamedTensors SplitModel::own_states(const NamedTensors& wholes) const {
  return changed(wholes, [](const Tensor& sharded, const Tensor&, const Tensor& whole) {
    if (whole.sizes() != sharded.sizes()) return whole;
    const NoGrad quiet;
    return to_local(distribute(detach(whole), mesh_of(sharded), placements_of(sharded), std::nullopt));
  });
}

}  // namespace chorale::train
