// Training that goes on when ranks die, as the trainer sees it. The trainer does not know the layer elastic, which the
// first build of `chorale` goes without (docs/dev/build.md): a program that has it gives the trainer such a loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "chorale/comm/group.h"
#include "chorale/data/sampler.h"
#include "chorale/optim/optimizer.h"
#include "chorale/parallel/ddp.h"

namespace chorale::train {

// What a rank takes of each step of an epoch.
struct Share {
  std::shared_ptr<const data::BatchSampler> pieces;
  int64_t pieces_of_step = 1;
  double examples = 0;          // a loss counts by how many of these it is the mean of
  int64_t examples_of_all = 0;  // in a step
  double lr_scale = 1;
};

class StepLoop {
 public:
  virtual ~StepLoop() = default;
  // The ranks; the object stays when they change. Before run(): this rank alone.
  virtual const comm::Group& group() = 0;
  // Ranks at the start of the job.
  virtual int first_size() const = 0;

  // A change of the ranks, when a step has been done since. Times in milliseconds.
  struct Event {
    int64_t epoch = 0;
    std::string cause{};
    int ranks = 0;          // from then on
    int newcomers = 0;      // among them
    bool repeated = false;  // a step that had begun
    double cost_ms = 0;     // from the failure, or the announcement, to the end of the first step
    double verdict_ms = 0, agreement_ms = 0, regroup_ms = 0, transfer_ms = 0;  // parts of it
  };
  struct Calls {
    std::function<void()> changed;        // all ranks are together, before the first step and after each change
    std::function<void()> before_change;  // on demand, while the ranks of before are still together
    std::function<void()> step;           // calls commit() once
    std::function<void(const Event& event)> event;
    std::function<std::string()> save;  // what a step that is repeated begins with, and a newcomer; cheap
    std::function<void(const std::string&)> load;
    std::function<std::string()> save_rest;  // what else a newcomer needs
    std::function<void(const std::string&)> load_rest;
  };
  // What is trained where each rank has a part of it.
  struct Parts {
    NamedTensors parameters{}, buffers{};
    optim::Optimizer* optimizer = nullptr;
    bool has_replicas = false;      // other ranks have the same parts
    std::shared_ptr<void> owner{};  // of all that
  };
  struct PartsCalls {
    // Makes it for these ranks, without values; called on all of them after each change, before Calls::changed.
    std::function<Parts(const comm::Group& ranks)> make;
    std::function<void()> lost;  // nobody has all parts any more: Calls::changed gives the model values
    int64_t copy_every = 0;      // steps between copies in a neighbour's memory; 0: none
  };
  // Deals to the ranks that there are now: `batch` examples of an order, or with `local` so many that each rank has as
  // many as at the start. A piece is not larger than `largest`.
  virtual Share deal(std::shared_ptr<const data::Sampler> order, int64_t batch, int64_t largest, bool local) = 0;

  // Takes steps until stop() was called in one of them. False: this rank is not needed any more, and the others go on.
  virtual bool run(parallel::DataParallelBase& model, optim::Optimizer& optimizer, const Calls& calls) = 0;
  virtual bool run_parts(const PartsCalls& parts, const Calls& calls) = 0;
  // The end of a step: when all have come, `values` are their sums and `update` is called, which calls nobody.
  virtual void commit(std::span<double> values, const std::function<void()>& update) = 0;
  // Called before commit(): this step is the last.
  virtual void stop() = 0;
};

}  // namespace chorale::train
