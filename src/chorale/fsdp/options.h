// How a module is fully sharded.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "chorale/sharding/layout.h"
#include "chorale/tensor/tensor.h"

namespace chorale::fsdp {

// What becomes of a group's whole parameters after forward: let go and gathered again for backward, kept, or kept as
// parts of which fewer ranks have all: reshard_after_forward = 2 gathers them among two ranks.
class ReshardAfterForward {
 public:
  // Let go, but kept in the root, whose backward comes next.
  constexpr ReshardAfterForward() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): .reshard_after_forward = true
  constexpr ReshardAfterForward(bool yes) : kind_(yes ? Kind::kAll : Kind::kKeep) {}
  // NOLINTNEXTLINE(google-explicit-constructor): .reshard_after_forward = 2
  constexpr ReshardAfterForward(int ways) : kind_(Kind::kFewer), ways_(ways) {}

  constexpr bool is_automatic() const { return kind_ == Kind::kAutomatic; }
  constexpr bool keeps() const { return kind_ == Kind::kKeep; }
  constexpr bool is_number() const { return kind_ == Kind::kFewer; }
  constexpr int ways() const { return ways_; }  // of a number

 private:
  enum class Kind : uint8_t { kAutomatic, kAll, kKeep, kFewer };
  Kind kind_ = Kind::kAutomatic;
  int ways_ = 0;
};

// Dtypes of floating tensors; none: they stay as they are. Shards, their gradients and optimizer states keep the
// parameters' own dtype.
struct Precision {
  std::optional<DType> parameters{};  // in which they are gathered and computed with
  std::optional<DType> reduce{};      // in which gradients are reduced; none: as `parameters`
  std::optional<DType> outputs{};     // of the module
  bool cast_inputs = true;            // floating inputs of the module become `parameters`
};

struct Options {
  // One dimension: shards. Two, with names: replicas and shards of each.
  Mesh mesh;
  ReshardAfterForward reshard_after_forward{};
  Precision mixed_precision{};
  // Parameters, gradients and optimizer states stay on the host where the module computes elsewhere, on `device`: whole
  // parameters are copied there when they have been gathered, and whole gradients come back. Without a device it
  // computes on the CPU, where they are anyway.
  bool offload = false;
  // Where the module computes, with offload; otherwise it computes where its parameters are. Inputs of the outermost
  // module that are on the host are copied there.
  std::optional<Device> device{};
  // The dimension by which a parameter is cut; none: the first. Any other must divide evenly.
  std::function<std::optional<int64_t>(const Tensor& parameter)> shard_dim{};
  // Parameters that are left alone.
  std::vector<Tensor> ignored{};
  // A thread moves gathers and reductions on while modules compute; none: where every rank has a core to spare for it.
  // Groups between hosts have one anyway.
  std::optional<bool> helper_thread{};
};

}  // namespace chorale::fsdp
