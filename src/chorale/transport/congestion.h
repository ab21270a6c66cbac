// Which congestion control the TCP connections between hosts use.
//
// Note [Congestion control]
// BBR lets every packet go at a time of its own, by timers of the kernel's: made for links across the Internet. Between
// hosts of one network the timers cost a third of the throughput (64 MiB all-reduced over a veth pair: 62 ms, with
// cubic 43). So where the system's is BBR and the address is a private one, connections use cubic, or reno, which every
// process may. It must be so from the beginning: what was BBR once keeps its timers under another name, and then loses
// by them, because packets that timers send overtake those that a thread sends.
//
// CHORALE_CONGESTION names the one for all connections, whatever the system's is.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::transport {

// The kernel's name for the congestion control of this socket.
std::string congestion_control_of(int descriptor);
// Whether routers of the Internet do not know this address (10.0.0.1, fd00::1).
bool is_private_address(const std::string& address);
// What to use in place of `current`, the best first; none: it stays.
std::span<const char* const> better_congestion_controls(std::string_view current, bool to_private_address);

// The name itself; throws InvalidArgument when this process may not use that congestion control. An empty name means
// any.
const std::string& checked_congestion_control(const std::string& name);
// Sets the congestion control of a socket to the one that was named, else to what Note [Congestion control] says.
// `address` is that of the other side for a socket that is not connected yet, its own for one that listens.
void choose_congestion_control(int descriptor, const std::string& address, const std::string& named);
// What is chosen for connections to this address when none was named.
std::string usual_congestion_control(const std::string& address);

// The sockets of this process that listen for TCP connections, and at which address.
struct Listener {
  int descriptor;
  std::string address;
};
std::vector<Listener> tcp_listeners();

}  // namespace chorale::transport
