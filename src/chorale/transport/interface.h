// The address by which a host is reached, of those that it has.
#pragma once

#include <string>
#include <vector>

#include "chorale/transport/socket.h"

namespace chorale::transport {

struct Interface {
  std::string name;
  std::string address;  // numeric
};
// The interfaces that are up, in the system's order; IPv4 before IPv6 for each; no link-local addresses.
std::vector<Interface> interfaces();

// The address at which the peer can reach this host, looked for in this order:
//   1. the interface that CHORALE_IFACE names;
//   2. GLOO_SOCKET_IFNAME (a name, or several with commas), then NCCL_SOCKET_IFNAME (beginnings of names; `=` in front
//      makes them whole names, `^` excludes them);
//   3. the route to the peer; to the world in general when `peer` is empty, or is a name of this host for itself.
// Throws InvalidArgument, in one line that says what to set, when there is none.
std::string own_address(const std::string& peer);

// Where a server listens so that others find it at the place that was named: there, unless the name is this host's own
// and stands for loopback in its table of names. Nobody else would get there.
Endpoint listening_place(const Endpoint& named);

}  // namespace chorale::transport
