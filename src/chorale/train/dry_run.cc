#include "chorale/train/dry_run.h"

#include <fmt/format.h>

#include <sstream>

#include "chorale/api/api.h"
#include "chorale/comm/world.h"
#include "chorale/device/allocator.h"
#include "chorale/train/job_device.h"
#include "chorale/train/progress.h"
#include "chorale/train/stepper.h"
#include "chorale/train/trainer.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::train {
namespace {

std::string mebibytes(double bytes) { return fmt::format("{:.1f} MiB", bytes / (1 << 20)); }

double bytes_of(const NamedTensors& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : tensors)
    bytes += static_cast<double>(tensor.elems()) * static_cast<double>(tensor.elem_bytes());
  return bytes;
}

}  // namespace

void dry_run(const TaskKind& kind, const TrainOptions& options, int ranks, std::FILE* out) {
  manual_seed(static_cast<uint64_t>(options.seed));
  const std::unique_ptr<Task> task = kind.make(options);
  task->place(device_of(options, 0));
  CHORALE_CHECK(options.tp == 1, "[train] --dry-run trains a step of one rank by itself, which --tp ", options.tp,
                " does not allow; leave --tp out to see the whole model");
  CHORALE_CHECK(!options.fsdp, "[train] --dry-run trains a step of one rank by itself, which --fsdp does not allow; ",
                "leave --fsdp out to see the whole model, or start it: memory is printed before the first step");
  const Plan plan = make_plan(options, task->examples(), ranks);
  comm::World world(std::make_shared<transport::MemoryStore>(), 0, 1);
  const JobRanks alone(world.group(), options);
  Stepper stepper(*task, options, plan.steps, alone);
  const auto loader = task->loader(std::make_shared<data::SequentialSampler>(task->examples()),
                                   {.batch_size = plan.examples_of_rank, .drop_last = true});
  Allocator& memory = allocator_of(task->device());
  memory.reset_peak();
  stepper.compute([&] { return *loader->next(); });
  stepper.update();

  std::ostringstream tree;
  tree << task->model();
  const double weights = bytes_of(task->model().named_parameters()), buffers = bytes_of(task->model().named_buffers());
  const double states = bytes_of(stepper.optimizer().state_dict());
  const auto peak = static_cast<double>(memory.stats().peak_bytes);
  const parallel::DdpLog log = stepper.ddp()->log();
  fmt::print(out, "{}\n\n{}\n", task->describe(), tree.str());
  fmt::print(out, "steps        {} of {} {}, {} to an epoch\n", grouped(plan.steps),
             grouped(options.batch * task->unit().per_example), task->unit().name, grouped(plan.steps_per_epoch));
  fmt::print(out, "ranks        {}, each with {} examples at a time, {} times a step\n", ranks, plan.examples_of_rank,
             options.accumulate);
  fmt::print(out, "parameters   {} in {} tensors\n", grouped(task->model().parameter_count()),
             task->model().named_parameters().size());
  fmt::print(out, "memory       {} at the peak of a step of one rank (measured):\n", mebibytes(peak));
  fmt::print(out, "             weights {}, gradients {}, optimizer {}, buffers {}, the rest is activations and data\n",
             mebibytes(weights), mebibytes(weights), mebibytes(states), mebibytes(buffers));
  fmt::print(out, "checkpoint   {}\n", mebibytes(weights + buffers + states));
  fmt::print(out, "buckets      {} bytes, in the order in which they are sent (gradients: {})\n", log.bucket_sizes,
             options.compress == "none" ? "not compressed" : options.compress);
}

}  // namespace chorale::train
