// The cases of `bench sharded` that train fully sharded, with ZeRO or as DDP does, and those of checkpoints.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "chorale/comm/mesh.h"

namespace chorale::app::bench_sharded {

struct TimedCall {
  std::function<void()> call;
  std::function<void()> after = {};  // what must be done between two calls and is not timed
};

// Whether a case is one of these: "step/MODEL/{fsdp,zero,ddp}", "checkpoint/…".
bool is_training_case(const std::string& name);
// Calls use() with what the case measures. Checkpoints are written below `folder`.
void with_training_case(const std::string& name, const comm::Mesh& mesh, const std::filesystem::path& folder,
                        const std::function<void(const TimedCall&)>& use);

// "memory/MODEL/{fsdp,zero2,ddp}": bytes of this rank.
struct PeakMemory {
  double measured = 0;  // the most in a step
  double expected = 0;  // of fully sharded training: what its parts, blocks and activations add up to; else 0
};
bool is_memory_case(const std::string& name);
PeakMemory peak_memory(const std::string& name, const comm::Mesh& mesh);

}  // namespace chorale::app::bench_sharded
