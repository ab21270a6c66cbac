#include "chorale/train/split_model.h"

#include <string_view>
#include <unordered_set>

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
  for (const auto& [name, parameter] : model.named_parameters()) parameters_.emplace(name, parameter);
  if (!ranks.is_split()) return;
  // Rank 0 may have read the model from a file. Styles that leave parameters whole take them to be equal everywhere.
  // What will be fully sharded as well has no values yet.
  for (const NamedTensors& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& [name, tensor] : tensors) {
      if (!ranks.shards()) ranks.all().broadcast(tensor, 0).wait();
    }
  }
  parallel::tensor_parallel(model, ranks.mesh()["tp"],
                            parallel::plan_for(model, {.sequence_parallel = options.sequence_parallel}));
  if (!ranks.shards()) {
    parts_ = parallel::Localized(model, {});
    return;
  }
  // A bias of several layers in one (GPT-2's queries, keys and values) that is cut among the ranks that share a layer
  // cannot be cut once more: those have all of it.
  for (const auto& [name, parameter] : model.named_parameters()) {
    if (parameter.dims() != 1 || !parameter.is_sharded() || !placements_of(parameter)[0].is_strided()) continue;
    const Tensor whole = Tensor::empty(parameter.sizes(), parameter.dtype(), kNull);
    set_data(parameter, distribute(whole, mesh_of(parameter), {replicate()}, std::nullopt));
  }
}

std::vector<Tensor> SplitModel::parameters() const {
  std::vector<Tensor> parameters = model_.parameters();
  for (Tensor& parameter : parameters) {
    if (parameter.is_sharded()) continue;  // fully sharded, and its gradient too
    const Tensor sharded = parts_.sharded(parameter);
    if (!sharded.is_sharded()) continue;
    if (const Tensor part = gradient(parameter); part.defined()) set_gradient(sharded, placed_as(sharded, part));
    parameter = sharded;
  }
  return parameters;
}

NamedTensors SplitModel::whole_model(bool wanted) const {
  NamedTensors wholes;
  for (const NamedTensors& tensors : {model_.named_parameters(), model_.named_buffers()}) {
    for (const auto& [name, tensor] : tensors) {
      const Tensor whole = whole_of(parts_.sharded(tensor));
      if (wanted) wholes.emplace_back(name, whole);
    }
  }
  return wholes;
}

NamedTensors SplitModel::placed_model(bool with_buffers) const {
  std::unordered_set<std::string> saved;  // not all buffers are
  for (const auto& [name, tensor] : model_.state_dict()) saved.insert(name);
  std::unordered_set<const Tensor::Impl*> seen;  // a tied weight is saved once
  NamedTensors tensors;
  const auto add = [&](const NamedTensors& some) {
    for (const auto& [name, tensor] : some) {
      if (saved.contains(name) && seen.insert(tensor.impl()).second) tensors.emplace_back(name, parts_.sharded(tensor));
    }
  };
  add(model_.named_parameters());
  if (with_buffers) add(model_.named_buffers());
  return tensors;
}

Tensor SplitModel::parameter_of(const std::string& state) const {
  constexpr std::string_view kPrefix = "state/";
  const size_t end = state.rfind('/');
  if (!state.starts_with(kPrefix) || end <= kPrefix.size()) return {};
  const auto found = parameters_.find(state.substr(kPrefix.size(), end - kPrefix.size()));
  return found == parameters_.end() ? Tensor() : found->second;
}

// Numbers, such as counts of steps, are the same on every rank.
Tensor SplitModel::placed_state(const std::string& name, const Tensor& state) const {
  const Tensor parameter = parameter_of(name);
  if (!parameter.defined() || state.is_sharded()) return state;
  const Tensor sharded = parts_.sharded(parameter);
  return sharded.is_sharded() && state.sizes() == parameter.sizes() ? placed_as(sharded, state) : state;
}

SplitModel::Room SplitModel::room_for_state(const std::string& name, const Shape& whole, DType dtype) const {
  const Tensor parameter = parameter_of(name);
  const Tensor sharded = parameter.defined() ? parts_.sharded(parameter) : Tensor();
  if (!sharded.defined() || !sharded.is_sharded() || sharded.sizes() != whole) {
    const Tensor room = empty(whole, dtype);
    return {room, room};
  }
  const Tensor local = sharding::local_of(sharded), part = Tensor::empty(local.sizes(), dtype, local.device());
  const Tensor placed = placed_as(sharded, part);
  return {placed, parameter.is_sharded() ? placed : part};
}

}  // namespace chorale::train
