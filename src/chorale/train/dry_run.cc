#include "chorale/train/dry_run.h"

#include <fmt/format.h>

#include <sstream>

#include "chorale/api/api.h"
#include "chorale/device/allocator.h"
#include "chorale/train/job_device.h"
#include "chorale/train/progress.h"
#include "chorale/train/stepper.h"
#include "chorale/train/trainer.h"

namespace chorale::train {
namespace {

std::string mebibytes(double bytes) { return fmt::format("{:.1f} MiB", bytes / (1 << 20)); }

double bytes_of(const NamedTensors& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : tensors)
    bytes += static_cast<double>(tensor.elems()) * static_cast<double>(tensor.elem_bytes());
  return bytes;
}
// What this rank has of them.
double own_bytes_of(const NamedTensors& tensors) {
  NamedTensors own;
  own.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) own.emplace_back(name, tensor.is_sharded() ? to_local(tensor) : tensor);
  return bytes_of(own);
}

}  // namespace

void dry_run(const TaskKind& kind, const TrainOptions& options, int ranks, const comm::Group& group, std::FILE* out,
             const ShardFully& shard_fully) {
  manual_seed(static_cast<uint64_t>(options.seed));
  const std::unique_ptr<Task> task = kind.make(options);
  task->place(device_of(options, group.rank()));
  check_ranks(options, ranks);
  TrainOptions fewer = options;
  fewer.dp = 0;
  fewer.hybrid.clear();  // the ranks here are one replica
  const JobRanks sharing(group, fewer);
  const Plan plan = make_plan(options, task->examples(), ranks / sharing.parts());
  const int64_t parameters = task->model().parameter_count();
  Stepper stepper(*task, fewer, plan.steps, sharing, shard_fully);
  if (sharing.shards()) task->draw_model();
  const auto loader =
      task->loader(std::make_shared<data::FixedBatches>(std::make_shared<data::SequentialSampler>(task->examples()),
                                                        plan.examples_of_rank, true),
                   {});
  Allocator& memory = allocator_of(task->device());
  memory.reset_peak();
  stepper.compute({options.accumulate, static_cast<double>(plan.examples_of_rank * options.accumulate)},
                  [&] { return *loader->next(); });
  UpdateResult update = stepper.prepare();
  stepper.update(update);

  // Each rank has its own part of these, and all of a checkpoint is written by somebody.
  NamedTensors saved = stepper.split().placed_model(true);
  for (const auto& [name, state] : stepper.optimizer().state_dict())
    saved.emplace_back(name, stepper.split().placed_state(name, state));
  const double checkpoint = bytes_of(saved);
  if (group.rank() != 0) return;
  std::ostringstream tree;
  tree << task->model();
  const double weights = own_bytes_of(task->model().named_parameters()),
               buffers = bytes_of(task->model().named_buffers());
  const double states = own_bytes_of(stepper.optimizer().state_dict());
  const auto peak = static_cast<double>(memory.stats().peak_bytes);
  fmt::print(out, "{}\n\n{}\n", task->describe(), tree.str());
  fmt::print(out, "steps        {} of {} {}, {} to an epoch\n", grouped(plan.steps),
             grouped(options.batch * task->unit().per_example), task->unit().name, grouped(plan.steps_per_epoch));
  const std::string shared =
      sharing.is_split() ? fmt::format(" ({} x {})", ranks / sharing.parts(), sharing.parts()) : std::string();
  fmt::print(out, "ranks        {}{}, each with {} examples at a time, {} times a step\n", ranks, shared,
             plan.examples_of_rank, options.accumulate);
  fmt::print(out, "parameters   {} in {} tensors", grouped(parameters), task->model().named_parameters().size());
  if (sharing.has_parts()) {
    int64_t own = 0;
    for (const Tensor& p : task->model().parameters()) own += (p.is_sharded() ? to_local(p) : p).elems();
    fmt::print(out, ", of which a rank has {}", grouped(own));
  }
  fmt::print(out, "\n");
  fmt::print(out, "memory       {} at the peak of a step of one rank (measured):\n", mebibytes(peak));
  fmt::print(out, "             weights {}, gradients {}, optimizer {}, buffers {}, the rest is activations and data\n",
             mebibytes(weights), mebibytes(weights), mebibytes(states), mebibytes(buffers));
  fmt::print(out, "checkpoint   {}\n", mebibytes(checkpoint));
  if (sharing.shards()) return;
  const parallel::DdpLog log = stepper.ddp()->log();
  fmt::print(out, "buckets      {} bytes, in the order in which they are sent (gradients: {})\n", log.bucket_sizes,
             options.compress == "none" ? "not compressed" : options.compress);
}

}  // namespace chorale::train
