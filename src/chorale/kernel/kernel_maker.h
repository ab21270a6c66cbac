// Devices whose kernels are compiled when they are first launched. A kind of device that does adds its maker beside its
// kernels.
#pragma once

#include "chorale/base/parallel_for.h"
#include "chorale/device/device.h"

namespace chorale::kernel {

// Thread-safe.
class KernelMaker {
 public:
  virtual ~KernelMaker() = default;
  // Calls `launches`, whose kernels are not launched there but compiled, several at a time.
  virtual void make_ahead(Device device, base::FunctionRef<void()> launches) = 0;
};

// Null where a kind of device has none.
KernelMaker* find_kernel_maker(DeviceType type);
// It lives as long as the process.
void set_kernel_maker(DeviceType type, KernelMaker* maker);

}  // namespace chorale::kernel
