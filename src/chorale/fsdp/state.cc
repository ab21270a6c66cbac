#include "chorale/fsdp/state.h"

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/sharding/sharded.h"

namespace chorale::fsdp {

NamedTensors full_state_dict(nn::Module& module, const FullStateOptions& options) {
  const NoGrad quiet;
  NamedTensors all = module.state_dict();
  bool is_wanted = !options.only_rank;
  for (auto& [name, value] : all) {
    if (!value.is_sharded()) continue;
    const comm::Group& ranks = mesh_of(value).group(size_t{0});
    is_wanted = is_wanted || (ranks.is_member() && ranks.global_rank(ranks.rank()) == *options.only_rank);
    value = full_tensor(value);
    if (!is_wanted) value = {};
  }
  if (!is_wanted) all.clear();
  return all;
}

void load_full_state_dict(nn::Module& module, const NamedTensors& state, std::optional<int> source) {
  const NoGrad quiet;
  if (!source) {
    module.load_state_dict(state);
    return;
  }
  NamedTensors parts;
  const NamedTensors own = module.state_dict();
  const auto some = std::find_if(own.begin(), own.end(), [](const auto& entry) { return entry.second.is_sharded(); });
  CHORALE_CHECK(some != own.end(), "[load_full_state_dict] no parameter of this ", module.type_name(),
                " is sharded: there are no ranks to send to");
  const Mesh& mesh = mesh_of(some->second);
  for (const auto& [name, value] : state) {
    const auto mine =
        std::find_if(own.begin(), own.end(), [&, &key = name](const auto& entry) { return entry.first == key; });
    const bool is_cut = mine != own.end() && mine->second.is_sharded() && mine->second.sizes() == value.sizes();
    // What no rank has a part of, such as a running mean, is sent whole.
    parts.emplace_back(
        name, is_cut ? distribute(detach(value), mesh_of(mine->second), placements_of(mine->second), source)
                     : to_local(distribute(detach(value), mesh, Placements(mesh.dims(), replicate()), source)));
  }
  module.load_state_dict(parts);
}

}  // namespace chorale::fsdp
