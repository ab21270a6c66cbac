// What a kernel found wrong in its data (an index out of range): the first such of a device is kept in memory that the
// host reads, and thrown when somebody waits.
#pragma once

#include <cstdint>
#include <string>

#include "chorale/device/device.h"

namespace chorale::cuda {

// What kernels see (Fault in prelude.cu).
struct Fault {
  uint32_t taken = 0;  // 2: complete
  int32_t row = 0;     // the number of the op's row
  int64_t at = 0, value = 0, bound = 0;
};
// The device's place for it. Its address is the same for host and device.
Fault* fault_of(Device device);
// Throws InvalidArgument when there is one, and forgets it.
void throw_fault(Device device);
// Says what a fault means; set by a layer that knows the ops.
using ExplainFault = std::string (*)(const Fault& fault);
void set_explain_fault(ExplainFault explain);

}  // namespace chorale::cuda
