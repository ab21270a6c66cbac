// An authenticated connection that carries whole messages: the store's, and any other control connection between ranks.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "chorale/base/deadline.h"
#include "chorale/transport/security/handshake.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {

// On the wire a message is its size in 4 bytes, its MAC, its bytes.
inline constexpr size_t kMessageHeaderBytes = sizeof(uint32_t) + MessageMac::kBytes;
std::string message_header(MessageMac& mac, std::string_view message);
uint32_t message_bytes(std::string_view header);
inline std::string_view message_mac(std::string_view header) { return header.substr(sizeof(uint32_t)); }

// Not thread-safe. Both constructors run the handshake (transport/security/handshake.h); a secret may be absent for a
// Unix socket only. After a CommError the channel is useless.
class ControlChannel {
 public:
  // The client's end. Tries until the deadline, and says so in the log after a few seconds; a client that is refused
  // after its proof gives up after ten tries.
  static ControlChannel connect(const Endpoint& endpoint, const std::optional<Secret>& secret, std::string_view purpose,
                                size_t max_message_bytes, Deadline deadline);
  // The server's end of an accepted connection.
  static ControlChannel accept(Socket socket, const std::optional<Secret>& secret, std::string_view purpose,
                               size_t max_message_bytes, Deadline deadline);

  void send(std::string_view message, Deadline deadline);
  std::string receive(Deadline deadline);
  const std::string& peer() const { return socket_.peer(); }
  int descriptor() const { return socket_.descriptor(); }

 private:
  ControlChannel(Socket socket, SessionMacs macs, size_t max_message_bytes);

  Socket socket_;
  SessionMacs macs_;
  size_t max_message_bytes_;
};

}  // namespace chorale::transport
