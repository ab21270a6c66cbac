#include "chorale/device/device.h"

#include <charconv>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale {
namespace {

constexpr const char* kNames[kDeviceTypes] = {"cpu", "null", "cuda", "sim"};

bool has_index(DeviceType type) { return type == DeviceType::kCuda || type == DeviceType::kSim; }

}  // namespace

Device device_from_name(std::string_view name) {
  const std::string_view kind = name.substr(0, name.find(':'));
  for (size_t i = 0; i < kDeviceTypes; ++i) {
    const auto type = static_cast<DeviceType>(i);
    if (kind != kNames[i]) continue;
    if (kind.size() == name.size()) return {type, 0};
    int16_t index = -1;
    const char* last = name.data() + name.size();
    const auto [end, error] = std::from_chars(name.data() + kind.size() + 1, last, index);
    if (has_index(type) && error == std::errc() && end == last && index >= 0) return {type, index};
  }
  throw InvalidArgument(concat("unknown device '", name, "'; expected cpu, null, cuda, cuda:N, sim or sim:N"));
}

const char* type_name(DeviceType type) { return kNames[static_cast<size_t>(type)]; }

std::ostream& operator<<(std::ostream& out, Device device) {
  out << type_name(device.type);
  return has_index(device.type) || device.index != 0 ? out << ":" << device.index : out;
}

}  // namespace chorale
