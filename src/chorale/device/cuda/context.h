// The devices of this process and their contexts.
#pragma once

#include <string>

#include "chorale/device/cuda/driver.h"
#include "chorale/device/device.h"

namespace chorale::cuda {

inline constexpr int kMostDevices = 64;

struct DeviceFacts {
  CUdevice number = 0;
  std::string name;
  std::string arch;  // sm_90
  int multiprocessors = 1;
  int shared_bytes = 0;  // of a multiprocessor
  size_t bytes = 0;      // of memory
};

int device_count();
const DeviceFacts& facts_of(Device device);
// Makes the device's context this thread's, which all calls of the driver need.
void make_current(Device device);

}  // namespace chorale::cuda
