// Fully sharded training as the trainer sees it. The trainer does not know the layer fsdp, which the first build of
// `chorale` goes without (docs/dev/build.md): a program that has it gives the trainer a function that shards a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "chorale/nn/module.h"
#include "chorale/train/job_ranks.h"

namespace chorale::train {

// A model that is sharded.
class FullSharding {
 public:
  virtual ~FullSharding() = default;
  // Whether backward passes reduce gradients, or leave them whole until one does.
  virtual void set_sync(bool wanted) = 0;
  // Seconds that this rank has waited for others since the first forward.
  virtual double seconds_waited() = 0;
  // Bytes on this rank: its parts of parameters and gradients, whole parameters that are there now, and those of the
  // largest group.
  struct Sizes {
    int64_t parts = 0, gradients = 0, gathered = 0, largest_block = 0;
  };
  virtual Sizes sizes() = 0;
  // Gives the parts the values that the first rank has as wholes: for each parameter one, in their
  // order. Those of the other ranks do not count, and may be none. All ranks call it.
  virtual void fill(const NamedTensors& wholes) = 0;
};

// Shards the model, which must outlive the result, over the ranks. All ranks call it, with models of one shape; they
// may be on the device null, and are then still without memory afterwards. It computes on `device`.
using ShardFully = std::function<std::unique_ptr<FullSharding>(nn::Module& model, const JobRanks& ranks,
                                                               const TrainOptions& options, Device device)>;

}  // namespace chorale::train
