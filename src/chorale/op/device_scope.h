// Where tensors are made that no other tensor decides about.
#pragma once

#include "chorale/device/device.h"

namespace chorale {

// While it lives, functions that make a tensor from sizes alone (empty, full, arange, uniform, normal, …) make it on
// this device where they are not asked for another one than the CPU. It holds for this thread. On the device null a
// model has shapes and takes no memory, and its random numbers are drawn from the generator all the same:
//
//   const DeviceScope without_memory(kNull);
//   models::Gpt2 model(config);
//
// nn::Module::materialize() gives it memory. (set_device() in api/compile.h changes the device without a scope.)
class DeviceScope {
 public:
  explicit DeviceScope(Device device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  Device device() const { return device_; }
  // The one that is current again when it ends.
  Device before() const { return before_; }

 private:
  Device device_, before_;
};

namespace op {
// The device for a tensor that was asked for on this one.
Device creation_device(Device asked);
// Changes it for good, in this thread.
void set_creation_device(Device device);
}  // namespace op

}  // namespace chorale
