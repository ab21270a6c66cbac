// What the jobs of `chorale train` share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "chorale/comm/group.h"

namespace chorale::app {

struct TrainOptions {
  std::string model = "cnn";
  int epochs = 5;
  int64_t steps = 0;  // of all epochs together; 0: as many as the epochs have
  int64_t batch = 128;
  double lr = 2e-3;  // the highest of a one-cycle schedule
  uint64_t seed = 1;
  int ranks = 0;    // 0: one for each core
  int threads = 1;  // of a rank
  bool quiet = false;
  int output = -1;  // descriptor of what rank 0 writes to; -1: standard output
};

// True once somebody pressed Ctrl-C (or sent SIGTERM): finish the step and leave. A second one ends the process at
// once.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  // On any rank: all ranks get the same answer, so that they leave after the same step.
  static bool requested(const comm::Group& group);
};

// Trains on Fashion-MNIST, as one rank of the group. Rank 0 writes to `out`.
void train_fashion_mnist(const TrainOptions& options, const comm::Group& group, std::FILE* out);

}  // namespace chorale::app
