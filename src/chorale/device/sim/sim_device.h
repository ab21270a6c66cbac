// The simulated device: the CPU behind asynchronous streams, with memory that the host cannot touch. It proves, where
// there is no GPU, that code asks for copies, orders streams by events and frees memory in the order of streams: what
// is forgotten gives a fault, or values that are wrong because the work ran late.
//
// Every access by the host to memory of a simulated device is a fault (SIGSEGV), and the message before it says whose
// memory it was. Pinned memory of the host faults likewise while a copy reads or writes it.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "chorale/device/runtime.h"

namespace chorale::sim {

struct Options {
  int devices = 2;
  size_t bytes = size_t{1} << 32;  // of memory per device, taken when it is used
  uint64_t seed = 1;               // of the delays
  std::chrono::microseconds most_delay{100};
};

// Once per process, before the first tensor there; kernels are added by eager/sim_kernels.h. A later call does nothing.
void add_device(const Options& options = {});

// Puts a task on a stream. Stream threads see device memory at open(address), and host memory where it is.
void put(Stream stream, std::function<void()> task);
void* open(const void* address);
// Says what a block holds, for the message of a fault.
void set_label(Device device, const void* address, std::string label);

// Tests use these: nothing begins on the stream between hold() and go_on(); and an allocator that hands freed blocks to
// any stream at once.
void hold(Stream stream);
void go_on(Stream stream);
void plant_early_reuse(Device device, bool planted);

}  // namespace chorale::sim
