// The server of a store that ranks reach through a socket. One rank, or the launcher, has it.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "chorale/transport/security/secret.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {

// Serves from a thread of its own, many clients at once; none of them can delay another, and waits cost the server
// nothing. A client that does not pass the handshake is refused with a line in the log that names the address. Clients
// that are connected when the server goes get a CommError.
class StoreServer {
 public:
  struct Limits {
    std::chrono::milliseconds handshake = std::chrono::seconds(5);  // from the connection to the proof
    std::chrono::milliseconds reply = std::chrono::seconds(30);     // to take a reply that was asked for
    // Connections that have not proved themselves; then one is dropped (stranger_to_drop), and a rank tries again.
    size_t strangers = 256;
  };

  // A server without a secret must be at a Unix socket. Port 0 takes a free one.
  StoreServer(const Endpoint& endpoint, std::optional<Secret> secret, Limits limits);
  StoreServer(const Endpoint& endpoint, std::optional<Secret> secret)
      : StoreServer(endpoint, std::move(secret), Limits()) {}
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const Endpoint& endpoint() const;
  // How many are connected and have proved themselves.
  int clients() const;
  // Returns when none is connected, at the deadline at the latest: a rank that leaves first would otherwise take the
  // store from under the others.
  void wait_for_clients_to_leave(Deadline deadline) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace chorale::transport
