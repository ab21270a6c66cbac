// What all training jobs let their users choose.
#pragma once

#include "chorale/train/option_table.h"

namespace chorale::train {

// Limits of options that several commands have.
constexpr double kMostRanks = 65536;  // on a node
constexpr double kMostNodes = 65536;
constexpr double kMostWorld = 1'000'000;  // ranks of all nodes
constexpr double kMostThreads = 1024;
constexpr double kMostSteps = 1e15;
constexpr double kMostSeed = 9223372036854775807.0;

struct TrainOptions {
  // How long, and on how much at a time.
  int64_t epochs = 5;
  int64_t steps = 0;    // of all epochs together; 0: as many as the epochs have
  int64_t batch = 128;  // examples in a step, of all ranks together
  int64_t accumulate = 1;

  // How gradients become steps.
  std::string optimizer = "adamw";
  double lr = 2e-3;
  std::string schedule = "one-cycle";
  int64_t warmup = 0;
  double weight_decay = 0.01;
  double clip = 0;
  std::string precision = "f32";
  bool fp8 = false;  // linear layers but heads in 8 bits; only tasks on text list it
  std::string compress = "none";
  int64_t seed = 1;
  std::string init;  // folder of a model to start from
  std::string on_nan = "stop";
  bool compile = false;

  // What is written down, and when, in steps; 0: not before the end (of an epoch, for evaluations).
  int64_t log_every = 10;
  int64_t evaluate_every = 0;
  int64_t checkpoint_every = 500;
  int64_t keep = 3;
  std::string out;
  bool resume = false;
  bool resume_previous = false;

  std::string device = "auto";
  int64_t ranks = 0;  // on this node; 0: one for each core, or for each GPU
  // How ranks share the work: replicas by parts of the model. Only tasks whose model has a plan list these.
  int64_t tp = 1;
  int64_t dp = 0;  // 0: as many as there are ranks for
  bool sequence_parallel = false;
  bool fsdp = false;
  std::string hybrid;  // with fsdp: "2x4", replicas by shards; empty: one replica
  bool offload = false;
  std::string elastic_batch = "global";  // what stays when ranks come and go: or "local"
  int64_t copy_every = 10;               // steps between copies of parts, where ranks that come and go have parts
  int64_t threads = 1;
  bool dry_run = false;
  bool quiet = false;
};

void list_options(TrainOptions& options, OptionTable& table);

}  // namespace chorale::train
