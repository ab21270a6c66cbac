// Which ranks can share memory.
#pragma once

#include <string>

namespace chorale::transport {

// Equal for processes of one boot of one machine in one network namespace. The namespace counts because a test, or a
// container, with a network of its own is treated as another host.
std::string host_identity();
// The name of this machine, for people.
std::string host_name();

}  // namespace chorale::transport
