#include "chorale/op/device_scope.h"

#include <utility>

namespace chorale {
namespace {
constinit thread_local Device default_creation_device = kCpu;
}  // namespace

DeviceScope::DeviceScope(Device device) : device_(device), before_(std::exchange(default_creation_device, device)) {}
DeviceScope::~DeviceScope() { default_creation_device = before_; }

namespace op {
Device creation_device(Device asked) { return asked == kCpu ? default_creation_device : asked; }
void set_creation_device(Device device) { default_creation_device = device; }
}  // namespace op

}  // namespace chorale
