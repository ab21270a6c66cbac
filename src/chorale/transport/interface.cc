#include "chorale/transport/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = "";
  getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

std::string listing() {
  std::string text;
  for (const Interface& interface : interfaces()) {
    text += concat(text.empty() ? "" : ", ", interface.name, " ", interface.address);
  }
  return text.empty() ? "none is up" : text;
}

std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> words;
  while (true) {
    const size_t comma = list.find(',');
    words.push_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return words;
    list.remove_prefix(comma + 1);
  }
}

using Filter = std::function<bool(std::string_view name)>;

Filter one_of(const std::string& list) {
  return [list](std::string_view name) {
    const auto names = split(list);
    return std::find(names.begin(), names.end(), name) != names.end();
  };
}

Filter nccl_filter(const std::string& text) {
  std::string_view list = text;
  const bool excludes = list.starts_with('^');
  if (excludes) list.remove_prefix(1);
  const bool whole = list.starts_with('=');
  if (whole) list.remove_prefix(1);
  return [excludes, whole, list = std::string(list)](std::string_view name) {
    const auto words = split(list);
    const bool listed = std::any_of(words.begin(), words.end(), [&](std::string_view word) {
      return whole ? name == word : name.starts_with(word);
    });
    // Loopback reaches nobody else: it must be asked for.
    return excludes ? !listed && name != "lo" : listed;
  };
}

// What the variable chooses, or nothing when it is not set.
std::optional<std::string> chosen_by(const char* variable, Filter (*filter_of)(const std::string&)) {
  const auto value = config::env(variable);
  if (!value) return std::nullopt;
  const Filter filter = filter_of(*value);
  for (const Interface& interface : interfaces()) {
    if (filter(interface.name)) return interface.address;
  }
  throw InvalidArgument(
      concat("[interface] ", variable, "=", *value, " names no interface that is up; there are: ", listing()));
}

// The source address that the kernel would take; nothing is sent.
std::optional<std::string> address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  for (; found; found = found->ai_next) {
    const int probe = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    const bool routed = probe >= 0 && connect(probe, found->ai_addr, found->ai_addrlen) == 0 &&
                        getsockname(probe, reinterpret_cast<sockaddr*>(&own), &size) == 0;
    if (probe >= 0) close(probe);
    if (routed) return numeric(reinterpret_cast<sockaddr*>(&own), size);
  }
  return std::nullopt;
}

}  // namespace

std::vector<Interface> interfaces() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  std::vector<Interface> found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = all; entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || !(entry->ifa_flags & IFF_UP)) continue;
      if (family == AF_INET6 &&
          IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr)) {
        continue;
      }
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      found.push_back({entry->ifa_name, numeric(entry->ifa_addr, size)});
    }
  }
  return found;
}

std::string own_address(const std::string& peer) {
  if (auto address = chosen_by("CHORALE_IFACE", one_of)) return *address;
  if (auto address = chosen_by("GLOO_SOCKET_IFNAME", one_of)) return *address;
  if (auto address = chosen_by("NCCL_SOCKET_IFNAME", nccl_filter)) return *address;
  // An address reserved for documentation: the route to it is the default route.
  if (auto address = address_towards(peer.empty() || is_loopback(peer) ? "192.0.2.1" : peer)) return *address;
  throw InvalidArgument(concat("[interface] no route to ", peer.empty() ? "other hosts" : peer,
                               "; set CHORALE_IFACE to one of: ", listing()));
}

Endpoint listening_place(const Endpoint& named) {
  const bool loopback_is_meant = named.host == "localhost" || named.host.starts_with("127.") || named.host == "::1";
  if (loopback_is_meant || !is_loopback(named.host)) return named;
  return Endpoint::tcp(own_address(""), named.port);
}

}  // namespace chorale::transport
