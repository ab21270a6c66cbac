// Where a tensor lives. `null` has shapes and no bytes: models can be built, sized and traced without memory. `sim` is
// the CPU behind asynchronous streams, with memory that the host cannot touch (sim/sim_device.h): what is right there
// is right on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace chorale {

enum class DeviceType : uint8_t { kCpu, kNull, kCuda, kSim };
inline constexpr size_t kDeviceTypes = 4;

struct Device {
  DeviceType type = DeviceType::kCpu;
  int16_t index = 0;

  friend bool operator==(Device, Device) = default;
};
inline constexpr Device kCpu{DeviceType::kCpu};
inline constexpr Device kNull{DeviceType::kNull};

// "cpu", "null", "cuda:1", "sim:0" and back; throws InvalidArgument for anything else.
Device device_from_name(std::string_view name);
std::ostream& operator<<(std::ostream& out, Device device);
// "cpu", "null", "cuda", "sim".
const char* type_name(DeviceType type);

// An order of work on a device: what is put on one stream happens there in that order. The CPU has one, the calling
// thread's own. How to make streams and to wait for them is in stream.h.
struct Stream {
  Device device;
  void* handle = nullptr;  // the runtime's (runtime.h); null on the CPU

  friend bool operator==(const Stream&, const Stream&) = default;
};

}  // namespace chorale
