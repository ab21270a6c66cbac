#include "chorale/transport/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = sizeof(sockaddr_storage);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  int family() const { return bytes.ss_family; }
};

std::string text_of(const Address& address) {
  if (address.family() == AF_UNIX) {
    const auto& name = reinterpret_cast<const sockaddr_un&>(address.bytes);
    const size_t header = offsetof(sockaddr_un, sun_path) + 1;  // an abstract name starts with a zero byte
    return "unix:" + (address.size > header ? std::string(name.sun_path + 1, address.size - header) : "(no name)");
  }
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  getnameinfo(address.get(), address.size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return address.family() == AF_INET6 ? concat("[", host, "]:", port) : concat(host, ":", port);
}

Address unix_address(const std::string& name) {
  Address address;
  auto& to = reinterpret_cast<sockaddr_un&>(address.bytes);
  CHORALE_CHECK(name.size() + 1 <= sizeof to.sun_path, "[socket] the name of a Unix socket is too long: ", name);
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Empty, with the reason in `problem`, when the name has no address (yet).
std::vector<Address> resolve(const Endpoint& endpoint, std::string& problem) {
  if (endpoint.is_unix()) return {unix_address(endpoint.unix_name)};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (error != 0) {
    problem = concat("no address for '", endpoint.host, "': ", gai_strerror(error));
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<Address> addresses;
  for (; found; found = found->ai_next) {
    Address& address = addresses.emplace_back();
    std::memcpy(&address.bytes, found->ai_addr, found->ai_addrlen);
    address.size = found->ai_addrlen;
  }
  return addresses;
}

int new_socket(int family) {
  const int made = above_standard(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (made < 0) throw CommError(concat("[socket] cannot make a socket: ", std::strerror(errno)));
  return made;
}

void set_option(int descriptor, int level, int name) {
  const int on = 1;
  setsockopt(descriptor, level, name, &on, sizeof on);
}

// Small messages at once; a host that vanished is noticed some day.
void tune(int descriptor, int family) {
  if (family == AF_UNIX) return;
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY);
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE);
}

bool same_user(int descriptor) {
  ucred other{};
  socklen_t size = sizeof other;
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 && other.uid == geteuid();
}

bool is_wildcard(const Address& address) {
  if (address.family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address.bytes).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return address.family() == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address.bytes).sin6_addr);
}

int poll_timeout_ms(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(std::min<Deadline::Clock::duration>(deadline.left(), 1h));
  return static_cast<int>(left.count());
}

// Returns 0 or the error.
int connect_once(int descriptor, const Address& address, Deadline deadline) {
  if (connect(descriptor, address.get(), address.size) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd state{descriptor, POLLOUT, 0};
  while (poll(&state, 1, poll_timeout_ms(deadline)) <= 0) {
    if (deadline.passed()) return ETIMEDOUT;
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

Endpoint Endpoint::parse(std::string_view text) {
  if (text.starts_with("unix:")) {
    CHORALE_CHECK(text.size() > 5, "[socket] 'unix:' needs a name");
    return unix_socket(std::string(text.substr(5)));
  }
  const size_t colon = text.rfind(':');
  CHORALE_CHECK(colon != std::string_view::npos && colon > 0, "[socket] expected HOST:PORT, not '", text, "'");
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  CHORALE_CHECK(error == std::errc() && end == digits.data() + digits.size(),
                "[socket] the port must be a number up to ", UINT16_MAX, ", not '", digits, "' (in '", text, "')");
  const bool brackets = host.front() == '[' && host.back() == ']';
  CHORALE_CHECK(brackets || host.find(':') == std::string_view::npos, "[socket] write an IPv6 address in brackets, [",
                host, "]:", digits);
  if (brackets) host = host.substr(1, host.size() - 2);
  CHORALE_CHECK(!host.empty(), "[socket] expected HOST:PORT, not '", text, "'");
  return tcp(std::string(host), port);
}

std::string Endpoint::text() const {
  if (is_unix()) return "unix:" + unix_name;
  return host.find(':') == std::string::npos ? concat(host, ":", port) : concat("[", host, "]:", port);
}

Socket::Socket(Socket&& other) noexcept : descriptor_(other.release()), peer_(std::move(other.peer_)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(peer_, other.peer_);
  return *this;
}

Socket::~Socket() {
  if (*this) close(descriptor_);
}

int Socket::release() { return std::exchange(descriptor_, -1); }

void Socket::await(short events, std::string_view what, Deadline deadline) const {
  pollfd state{descriptor_, events, 0};
  while (poll(&state, 1, poll_timeout_ms(deadline)) <= 0) {
    if (deadline.passed()) throw CommError(concat("[socket] ", what, " ", peer_, " took too long"));
  }
}

void Socket::send(std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN) {
      await(POLLOUT, "sending to", deadline);
    } else if (errno != EINTR) {
      throw CommError(concat("[socket] lost ", peer_, " while sending: ", std::strerror(errno)));
    }
  }
}

void Socket::receive(std::span<char> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t n = recv(descriptor_, bytes.data(), bytes.size(), 0);
    if (n > 0) {
      bytes = bytes.subspan(static_cast<size_t>(n));
    } else if (n == 0) {
      throw CommError(concat("[socket] ", peer_, " closed the connection"));
    } else if (errno == EAGAIN) {
      await(POLLIN, "waiting for", deadline);
    } else if (errno != EINTR) {
      throw CommError(concat("[socket] lost ", peer_, " while receiving: ", std::strerror(errno)));
    }
  }
}

Socket listen_at(const Endpoint& endpoint) {
  std::string problem;
  bool in_use = false;
  for (const Address& address : resolve(endpoint, problem)) {
    CHORALE_CHECK(!is_wildcard(address), "[socket] ", endpoint.text(),
                  " would listen on every interface; name one address, or an interface with CHORALE_IFACE");
    Socket listener(new_socket(address.family()), "listener at " + endpoint.text());
    if (!endpoint.is_unix()) set_option(listener.descriptor(), SOL_SOCKET, SO_REUSEADDR);
    if (bind(listener.descriptor(), address.get(), address.size) == 0 && listen(listener.descriptor(), 1024) == 0) {
      return listener;
    }
    in_use = in_use || errno == EADDRINUSE;
    problem = std::strerror(errno);
  }
  const std::string text = concat("[socket] cannot listen at ", endpoint.text(), ": ", problem);
  if (in_use) throw AddressInUse(text);
  throw CommError(text);
}

Endpoint endpoint_of(const Socket& listener) {
  Address address;
  CHORALE_INVARIANT(getsockname(listener.descriptor(), address.get(), &address.size) == 0, "a socket without a name");
  return Endpoint::parse(text_of(address));
}

Socket accept_at(const Socket& listener) {
  while (true) {
    Address address;
    const int made =
        above_standard(accept4(listener.descriptor(), address.get(), &address.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (made < 0) {
      if (errno == EAGAIN) return {};
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) continue;  // that one has left
      throw CommError(concat("[socket] cannot accept at ", listener.peer(), ": ", std::strerror(errno)));
    }
    Socket accepted(made, text_of(address));
    if (address.family() == AF_UNIX && !same_user(made)) {
      log_warning("[socket] refused a connection of another user at " + listener.peer());
      continue;
    }
    tune(made, address.family());
    return accepted;
  }
}

Socket connect_to(const Endpoint& endpoint, Deadline deadline, const std::function<void(int)>& prepare) {
  CHORALE_CHECK(endpoint.is_unix() || endpoint.port != 0, "[socket] ", endpoint.text(),
                ": port 0 cannot be connected to");
  const auto start = Deadline::Clock::now();
  Deadline::Clock::duration next_note = 4s;
  std::chrono::milliseconds pause = 5ms;
  while (true) {
    std::string problem;
    for (const Address& address : resolve(endpoint, problem)) {
      Socket made(new_socket(address.family()), endpoint.text());
      if (prepare) prepare(made.descriptor());
      // A packet that is dropped on the way must not use up the whole time, nor keep us from saying so.
      const Deadline attempt = deadline.earlier(within(10s)).earlier(Deadline(start + next_note));
      const int error = connect_once(made.descriptor(), address, attempt);
      if (error == 0) {
        if (address.family() == AF_UNIX && !same_user(made.descriptor())) {
          throw CommError(concat("[socket] ", endpoint.text(), " is held by another user; choose another port"));
        }
        tune(made.descriptor(), address.family());
        return made;
      }
      problem = std::strerror(error);
    }
    if (deadline.passed()) {
      throw CommError(concat("[socket] cannot connect to ", endpoint.text(), ": ", problem,
                             "; is its rank (or launcher) running, and does a firewall let us through?"));
    }
    if (Deadline::Clock::now() - start >= next_note) {
      log_info(concat("[socket] still trying to connect to ", endpoint.text(), ": ", problem));
      next_note *= 4;
    }
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, deadline.left()));
    pause = std::min<std::chrono::milliseconds>(pause * 2, 200ms);
  }
}

void allow_many_descriptors() {
  constexpr rlim_t kEnough = 65536;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnough) return;
  limit.rlim_cur = std::min(limit.rlim_max, kEnough);
  setrlimit(RLIMIT_NOFILE, &limit);
}

bool is_local_host(const std::string& host) {
  std::string problem;
  for (const Address& address : resolve(Endpoint::tcp(host, 0), problem)) {
    // The kernel binds a socket to an address of its own only.
    const Socket probe(new_socket(address.family()), host);
    if (bind(probe.descriptor(), address.get(), address.size) == 0) return true;
  }
  return false;
}

bool is_loopback(const std::string& host) {
  std::string problem;
  const std::vector<Address> addresses = resolve(Endpoint::tcp(host, 0), problem);
  return !addresses.empty() && std::all_of(addresses.begin(), addresses.end(), [](const Address& address) {
    if (address.family() == AF_INET6) {
      return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address.bytes).sin6_addr) != 0;
    }
    return ntohl(reinterpret_cast<const sockaddr_in&>(address.bytes).sin_addr.s_addr) >> 24 == 127;
  });
}

}  // namespace chorale::transport
