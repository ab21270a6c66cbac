#include "chorale/transport/congestion.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netdb.h>
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

constexpr std::array<const char*, 2> kWithoutTimers{"cubic", "reno"};

bool set(int descriptor, std::string_view name) {
  return setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

int option(int descriptor, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return getsockopt(descriptor, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

}  // namespace

std::string congestion_control_of(int descriptor) {
  std::array<char, 64> name{};
  socklen_t size = name.size();
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return name.data();
}

bool is_private_address(const std::string& address) {
  in_addr four{};
  if (inet_pton(AF_INET, address.c_str(), &four) == 1) {
    const uint32_t bits = ntohl(four.s_addr);
    constexpr struct {
      uint32_t prefix, length;
    } kPrivate[] = {{10U << 24, 8},                 // RFC 1918
                    {172U << 24 | 16 << 16, 12},    //
                    {192U << 24 | 168 << 16, 16},   //
                    {100U << 24 | 64 << 16, 10},    // RFC 6598
                    {169U << 24 | 254U << 16, 16},  // this link
                    {127U << 24, 8}};               // this host
    for (const auto& [prefix, length] : kPrivate) {
      if ((bits ^ prefix) >> (32 - length) == 0) return true;
    }
    return false;
  }
  in6_addr six{};
  if (inet_pton(AF_INET6, address.substr(0, address.find('%')).c_str(), &six) != 1) return false;
  return (six.s6_addr[0] & 0xfe) == 0xfc || IN6_IS_ADDR_LINKLOCAL(&six) || IN6_IS_ADDR_LOOPBACK(&six);
}

std::span<const char* const> better_congestion_controls(std::string_view current, bool to_private_address) {
  if (!current.starts_with("bbr") || !to_private_address) return {};
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

void choose_congestion_control(int descriptor, const std::string& address, const std::string& named) {
  if (!named.empty()) {
    set(descriptor, named);
    return;
  }
  for (const char* name : better_congestion_controls(congestion_control_of(descriptor), is_private_address(address))) {
    if (set(descriptor, name)) return;
  }
}

std::string usual_congestion_control(const std::string& address) {
  const Socket trial(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "");
  choose_congestion_control(trial.descriptor(), address, "");
  return congestion_control_of(trial.descriptor());
}

std::vector<Listener> tcp_listeners() {
  std::vector<Listener> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (!folder) return found;
  while (const dirent* entry = readdir(folder.get())) {
    int descriptor = -1;
    std::from_chars(entry->d_name, entry->d_name + std::strlen(entry->d_name), descriptor);
    if (option(descriptor, SO_PROTOCOL) != IPPROTO_TCP || option(descriptor, SO_ACCEPTCONN) != 1) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    std::array<char, NI_MAXHOST> text{};
    if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0)
      found.push_back({descriptor, text.data()});
  }
  return found;
}

}  // namespace chorale::transport
