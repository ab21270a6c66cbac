// Which congestion control the TCP connections between hosts use.
//
// Note [Congestion control]
// BBR lets every packet go at a time of its own, by timers of the kernel's: made for links across the Internet. Between
// hosts that are near each other the timers cost a third of the throughput (64 MiB all-reduced over a veth pair: 63 ms,
// with cubic 43). So a connection to a near peer that would use BBR uses cubic, or reno, which every process may.
// CHORALE_CONGESTION names the one for all connections, whatever the system's is.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::transport {

// As the kernel calls the one of this socket.
std::string congestion_control_of(int descriptor);
// In place of `current` where a round trip takes this long, the best first; none: it stays.
std::span<const char* const> better_congestion_controls(std::string_view current, std::chrono::microseconds round_trip);

// Throws InvalidArgument when this process may not use it; empty: any.
const std::string& checked_congestion_control(const std::string& name);
// Of a connection: the one that was named, else by Note [Congestion control].
void choose_congestion_control(int descriptor, const std::string& named);

// The TCP connections that this process has open.
std::vector<int> tcp_connections();

}  // namespace chorale::transport
