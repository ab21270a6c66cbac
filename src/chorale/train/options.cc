#include "chorale/train/options.h"

namespace chorale::train {
namespace {

constexpr double kMostEpochs = 1e9, kMostExamples = 1e9;

}  // namespace

void list_options(TrainOptions& o, OptionTable& table) {
  using enum OptionKind;
  table.add({.name = "epochs",
             .help = "passes over the training data",
             .target = &o.epochs,
             .kind = kFree,
             .least = 1,
             .most = kMostEpochs});
  table.add({.name = "steps",
             .help = "end after this many steps; 0: when the epochs are over",
             .target = &o.steps,
             .kind = kFree,
             .most = kMostSteps});
  table.add({.name = "batch",
             .help = "examples in a step, of all ranks together",
             .target = &o.batch,
             .least = 1,
             .most = kMostExamples});
  table.add({.name = "accumulate",
             .help = "backward passes that share a step's batch, to save memory",
             .target = &o.accumulate,
             .kind = kFree,
             .least = 1,
             .most = 1e6});

  table.add({.name = "optimizer",
             .help = "how gradients become steps",
             .target = &o.optimizer,
             .choices = {"adamw", "adam", "sgd", "rmsprop", "adagrad", "lamb"}});
  table.add({.name = "lr", .help = "highest learning rate", .target = &o.lr, .most = 1e6});
  table.add({.name = "schedule",
             .help = "learning rate over time",
             .target = &o.schedule,
             .choices = {"one-cycle", "cosine", "linear", "constant"}});
  table.add({.name = "warmup",
             .help = "steps in which the learning rate rises (not for one-cycle, which has its own)",
             .target = &o.warmup,
             .most = kMostSteps});
  table.add({.name = "weight-decay", .help = "of the optimizer", .target = &o.weight_decay, .most = 1e6});
  table.add({.name = "clip", .help = "largest norm of all gradients together; 0: any", .target = &o.clip, .most = 1e9});
  table.add({.name = "precision",
             .help = "of products: f32, or mixed with bf16 or f16",
             .target = &o.precision,
             .choices = {"f32", "bf16", "f16"}});
  table.add({.name = "compress",
             .help = "how gradients travel between ranks",
             .target = &o.compress,
             .choices = {"none", "bf16", "powersgd"}});
  table.add({.name = "seed", .help = "of weights, order and dropout", .target = &o.seed, .most = kMostSeed});
  table.add({.name = "init",
             .help = "start from the model in this folder (safetensors)",
             .target = &o.init,
             .value_name = "DIR"});
  table.add({.name = "on-nan",
             .help = "what to do when the loss or a gradient is not finite",
             .target = &o.on_nan,
             .kind = kFree,
             .choices = {"stop", "continue"}});

  table.add({.name = "compile",
             .help = "run forward and backward passes from graphs, with kernels made by the system's C compiler",
             .target = &o.compile,
             .kind = kFree});

  table.add({.name = "log-every",
             .help = "steps between lines of metrics",
             .target = &o.log_every,
             .kind = kFree,
             .least = 1,
             .most = kMostSteps});
  table.add({.name = "evaluate-every",
             .help = "steps between evaluations; 0: after each epoch",
             .target = &o.evaluate_every,
             .kind = kFree,
             .most = kMostSteps});
  table.add({.name = "checkpoint-every",
             .help = "steps between checkpoints; 0: only at the end",
             .target = &o.checkpoint_every,
             .kind = kFree,
             .most = kMostSteps});
  table.add(
      {.name = "keep", .help = "checkpoints that are kept", .target = &o.keep, .kind = kFree, .least = 1, .most = 1e6});
  table.add({.name = "out",
             .help = "folder of the run; default: runs/TASK-1, or the next number that is free",
             .target = &o.out,
             .kind = kHere,
             .value_name = "DIR"});
  table.add({.name = "resume",
             .help = "go on with the run in --out, from its last checkpoint",
             .target = &o.resume,
             .kind = kHere});
  table.add({.name = "resume-previous",
             .help = "like --resume, but where a checkpoint is damaged use the one before",
             .target = &o.resume_previous,
             .kind = kHere});

  table.add({.name = "device",
             .help = "where the model is: cpu, cuda (rank r takes GPU r), cuda:N; auto: GPUs if there are any",
             .target = &o.device,
             .kind = kFree,
             .value_name = "DEVICE"});
  table.add({.name = "ranks",
             .help = "processes on this node that share each batch; 0: one for each GPU that is used, else for each "
                     "core, if that divides the batch",
             .target = &o.ranks,
             .kind = kFree,
             .most = kMostRanks,
             .also = "-n,--nproc-per-node"});
  table.add({.name = "elastic-batch",
             .help = "what stays when ranks come and go (--elastic): the batch of all, or that of each with a learning "
                     "rate by the number of ranks",
             .target = &o.elastic_batch,
             .kind = kFree,
             .choices = {"global", "local"}});
  table.add({.name = "threads",
             .help = "of each rank",
             .target = &o.threads,
             .kind = kFree,
             .least = 1,
             .most = kMostThreads});
  table.add({.name = "dry-run",
             .help = "show model, memory and buckets, and train nothing",
             .target = &o.dry_run,
             .kind = kHere});
  table.add({.name = "quiet", .help = "only the result", .target = &o.quiet, .kind = kHere});
}

}  // namespace chorale::train
