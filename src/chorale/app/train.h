// What the jobs of `chorale train` share.
#pragma once

#include <cstdint>
#include <string>

namespace chorale::app {

struct TrainOptions {
  std::string model = "cnn";
  int epochs = 5;
  int64_t steps = 0;  // of all epochs together; 0: as many as the epochs have
  int64_t batch = 128;
  double lr = 2e-3;  // the highest of a one-cycle schedule
  uint64_t seed = 1;
  int threads = 0;  // 0: all cores
  bool quiet = false;
};

// True once somebody pressed Ctrl-C (or sent SIGTERM): finish the step and leave. A second one ends the process at
// once.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  static bool requested();
};

// Trains on Fashion-MNIST; returns the accuracy on the test pictures.
double train_fashion_mnist(const TrainOptions& options);

}  // namespace chorale::app
