#include "chorale/device/cuda/context.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "chorale/base/error.h"

namespace chorale::cuda {
namespace {

std::vector<DeviceFacts> found_devices() {
  const Driver& api = driver();
  int count = 0;
  check(api.cuDeviceGetCount(&count), "counting devices");
  std::vector<DeviceFacts> devices(static_cast<size_t>(std::min(count, kMostDevices)));
  for (size_t i = 0; i < devices.size(); ++i) {
    DeviceFacts& facts = devices[i];
    check(api.cuDeviceGet(&facts.number, static_cast<int>(i)), "finding a device");
    char name[256] = {};
    check(api.cuDeviceGetName(name, sizeof(name), facts.number), "naming a device");
    facts.name = name;
    const auto attribute = [&](CUdevice_attribute what) {
      int value = 0;
      check(api.cuDeviceGetAttribute(&value, what, facts.number), "asking for an attribute of a device");
      return value;
    };
    facts.arch = concat("sm_", attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                        attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    facts.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    facts.shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    check(api.cuDeviceTotalMem(&facts.bytes, facts.number), "asking for a device's memory");
  }
  return devices;
}

const std::vector<DeviceFacts>& devices() {
  static const std::vector<DeviceFacts> found = found_devices();
  return found;
}

}  // namespace

int device_count() { return static_cast<int>(devices().size()); }

const DeviceFacts& facts_of(Device device) { return devices()[static_cast<size_t>(device.index)]; }

void make_current(Device device) {
  thread_local int current = -1;
  if (current == device.index) return;
  static std::once_flag retained[kMostDevices];
  static CUcontext contexts[kMostDevices];
  std::call_once(retained[device.index], [&] {
    check(driver().cuDevicePrimaryCtxRetain(&contexts[device.index], facts_of(device).number), "opening a device");
  });
  check(driver().cuCtxSetCurrent(contexts[device.index]), "choosing a device");
  current = device.index;
}

}  // namespace chorale::cuda
