// Where a tensor lives. `null` has shapes and no bytes: models can be built, sized and traced without memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace chorale {

enum class DeviceType : uint8_t { kCpu, kNull, kCuda };
inline constexpr size_t kDeviceTypes = 3;

struct Device {
  DeviceType type = DeviceType::kCpu;
  int16_t index = 0;

  friend bool operator==(Device, Device) = default;
};
inline constexpr Device kCpu{DeviceType::kCpu};
inline constexpr Device kNull{DeviceType::kNull};

// "cpu", "null", "cuda:1" and back; throws InvalidArgument for anything else.
Device device_from_name(std::string_view name);
std::ostream& operator<<(std::ostream& out, Device device);
// "cpu", "null", "cuda".
const char* type_name(DeviceType type);

// An order of work on a device. The CPU has one: the calling thread's own.
struct Stream {
  Device device;
  void* handle = nullptr;
};

}  // namespace chorale
