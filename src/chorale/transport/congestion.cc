#include "chorale/transport/congestion.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <charconv>
#include <cstring>
#include <fstream>
#include <memory>

#include "chorale/base/error.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {
namespace {

// A peer that answers within this is in the same building, or nearly.
constexpr std::chrono::microseconds kNear{5000};
constexpr std::array<const char*, 2> kWithoutTimers{"cubic", "reno"};

bool set(int descriptor, std::string_view name) {
  return setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::chrono::microseconds round_trip_of(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_rtt == 0)
    return std::chrono::microseconds::max();
  return std::chrono::microseconds(info.tcpi_rtt);
}

}  // namespace

std::string congestion_control_of(int descriptor) {
  std::array<char, 64> name{};
  socklen_t size = name.size();
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return name.data();
}

std::span<const char* const> better_congestion_controls(std::string_view current,
                                                        std::chrono::microseconds round_trip) {
  if (!current.starts_with("bbr") || round_trip > kNear) return {};
  return kWithoutTimers;
}

const std::string& checked_congestion_control(const std::string& name) {
  if (name.empty()) return name;
  const Socket trial(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "");
  if (set(trial.descriptor(), name)) return name;
  std::string allowed;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
  throw InvalidArgument(concat("[fabric] CHORALE_CONGESTION is '", name,
                               "', which this process may not use; the kernel allows: ", allowed));
}

void choose_congestion_control(int descriptor, const std::string& named) {
  if (!named.empty()) {
    set(descriptor, named);
    return;
  }
  for (const char* name : better_congestion_controls(congestion_control_of(descriptor), round_trip_of(descriptor))) {
    if (set(descriptor, name)) return;
  }
}

std::vector<int> tcp_connections() {
  std::vector<int> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (!folder) return found;
  while (const dirent* entry = readdir(folder.get())) {
    int descriptor = -1, protocol = 0;
    std::from_chars(entry->d_name, entry->d_name + std::strlen(entry->d_name), descriptor);
    socklen_t size = sizeof protocol;
    sockaddr_storage peer{};
    socklen_t peer_size = sizeof peer;
    if (getsockopt(descriptor, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 && protocol == IPPROTO_TCP &&
        getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0)
      found.push_back(descriptor);
  }
  return found;
}

}  // namespace chorale::transport
