// Stream sockets with deadlines, over TCP or between processes of one host.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "chorale/base/comm_error.h"
#include "chorale/base/deadline.h"

namespace chorale::transport {

// Where a server listens: a host and a port, or a name in the abstract namespace of Unix sockets, which is gone with
// its server and is seen only inside one network namespace.
struct Endpoint {
  std::string host;  // a name or an address; empty for a Unix socket
  uint16_t port = 0;
  std::string unix_name;

  static Endpoint tcp(std::string host, uint16_t port) { return {std::move(host), port, {}}; }
  static Endpoint unix_socket(std::string name) { return {{}, 0, std::move(name)}; }
  // The inverse of text(). Throws InvalidArgument.
  static Endpoint parse(std::string_view text);

  bool is_unix() const { return !unix_name.empty(); }
  // "host:29500", "[::1]:29500" or "unix:name".
  std::string text() const;
};

// Owns a descriptor. Failures are CommErrors that name the peer.
class Socket {
 public:
  Socket() = default;
  Socket(int descriptor, std::string peer) : descriptor_(descriptor), peer_(std::move(peer)) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  int release();
  const std::string& peer() const { return peer_; }

  void send(std::string_view bytes, Deadline deadline);
  // Exactly as many as fit.
  void receive(std::span<char> bytes, Deadline deadline);

 private:
  void await(short events, std::string_view what, Deadline deadline) const;

  int descriptor_ = -1;
  std::string peer_;
};

class AddressInUse : public CommError {
 public:
  using CommError::CommError;
};
// Port 0 takes a free one; AddressInUse when somebody listens there already. A wildcard address is refused: a server of
// ours listens at one place, which its user named.
Socket listen_at(const Endpoint& endpoint);
// Where it listens, with the port that it got.
Endpoint endpoint_of(const Socket& listener);
// The next connection, or an empty socket when there is none at the moment. One of another user (of a Unix socket) is
// closed, logged, and not counted. Throws CommError when the process cannot have another descriptor.
Socket accept_at(const Socket& listener);
// Tries until the deadline: the server may not be up yet. Says so in the log after a few seconds. `prepare` may change
// a socket before it is connected.
Socket connect_to(const Endpoint& endpoint, Deadline deadline, const std::function<void(int descriptor)>& prepare = {});

// Many systems start a process with 1,024 descriptors and let it ask for more.
void allow_many_descriptors();

// Whether the host's name or address is one of this machine (in this network namespace).
bool is_local_host(const std::string& host);
// Whether it stands for 127.0.0.0/8 or ::1. Many hosts call themselves so by their own name.
bool is_loopback(const std::string& host);

}  // namespace chorale::transport
