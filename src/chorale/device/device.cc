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

std::ostream& operator<<(std::ostream& out, Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return out << "cpu";
    case DeviceType::kNull:
      return out << "null";
    case DeviceType::kCuda:
      return out << "cuda:" << device.index;
  }
  return out;
}

}  // namespace chorale
