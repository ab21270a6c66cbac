// How the ranks of a group reach those on other hosts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "chorale/transport/security/secret.h"

namespace chorale::transport {
class FabricBuilder;
struct FabricName;
struct FabricOptions;
}  // namespace chorale::transport

namespace chorale::comm {

struct NetOptions {
  // The job's secret; otherwise it comes from the environment (transport/security/secret.h). Hosts do not talk to each
  // other without one.
  std::optional<transport::Secret> secret = {};
  // The address at which other hosts reach this one; otherwise that of the route to the world (transport/interface.h).
  std::string address = {};
  // Ranks of one host have the same label; otherwise the host's identity. Threads with different labels behave as if
  // they were on different hosts: for tests.
  std::optional<uint64_t> host = {};
};

// Ready to listen; secret, keep-alive and congestion control of `fabric` are filled in. Throws InvalidArgument for what
// cannot be, such as no secret.
std::unique_ptr<transport::FabricBuilder> make_fabric_builder(const transport::FabricName& kind,
                                                              const NetOptions& options,
                                                              transport::FabricOptions fabric);

}  // namespace chorale::comm
