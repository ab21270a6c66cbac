// All of a fully sharded module's state in ordinary tensors, for files of one process and for tests. What any number of
// ranks can load again, without whole tensors on the way, is a snapshot of state_dict() (snapshot/snapshot.h).
#pragma once

#include <optional>

#include "chorale/nn/module.h"

namespace chorale::fsdp {

struct FullStateOptions {
  // The one (global) rank that gets it; the others get nothing. None: all of them.
  std::optional<int> only_rank{};
};
// Every rank calls it. One parameter at a time is gathered.
NamedTensors full_state_dict(nn::Module& module, const FullStateOptions& options = {});

// The same names with whole tensors, of which every rank takes its part: those that the rank at place `source` of each
// line of the mesh has, which are sent to the others; none: every rank its own. Names are as in load_state_dict.
void load_full_state_dict(nn::Module& module, const NamedTensors& state, std::optional<int> source = {});

}  // namespace chorale::fsdp
