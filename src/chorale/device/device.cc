#include "chorale/device/device.h"

#include <charconv>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale {

Device device_from_name(std::string_view name) {
  if (name == "cpu") return kCpu;
  if (name == "null") return kNull;
  if (name == "cuda") return {DeviceType::kCuda, 0};
  if (name.starts_with("cuda:")) {
    int16_t index = -1;
    const char* last = name.data() + name.size();
    const auto [end, error] = std::from_chars(name.data() + 5, last, index);
    if (error == std::errc() && end == last && index >= 0) return {DeviceType::kCuda, index};
  }
  throw InvalidArgument(concat("unknown device '", name, "'; expected cpu, null, cuda or cuda:N"));
}

const char* type_name(DeviceType type) {
  constexpr const char* names[kDeviceTypes] = {"cpu", "null", "cuda"};
  return names[static_cast<size_t>(type)];
}

std::ostream& operator<<(std::ostream& out, Device device) {
  out << type_name(device.type);
  return device.type == DeviceType::kCuda ? out << ":" << device.index : out;
}

}  // namespace chorale
