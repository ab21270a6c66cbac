// Inside checkpoint: steps that all ranks take together. What a rank throws travels as a value, so that no rank waits
// for one that has failed.
#pragma once

#include "chorale/comm/value.h"
#include "chorale/snapshot/snapshot.h"

namespace chorale::snapshot {

// Runs `work` on every rank and gives all results to all, by group rank. Throws a CheckpointError on every rank when it
// threw on some. A group of which this rank is no member counts as a group of this rank alone.
std::vector<comm::Value> everywhere(const comm::Group& group, Step step, const std::function<void(Step)>& on_step,
                                    const std::function<comm::Value()>& work);

// What this rank could write: chunks in their order, then bytes. `with_fingerprints`: of what other ranks may have too.
std::vector<WriteItem> items_of(const State& state, bool with_fingerprints);

}  // namespace chorale::snapshot
