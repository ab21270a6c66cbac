// One TLS 1.3 connection between two ranks, on a socket that does not block. Its key comes from the job's secret (an
// external pre-shared key: no certificates, no older protocol, and nothing goes on without the key), its forward
// secrecy from a fresh exchange of X25519.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "chorale/transport/security/secret.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {

// What a connection is for. The connecting rank says so in its first message, under the key's protection. Each side has
// a token, which it told in the meeting of this job (tls_join.h): a connection that was meant for an earlier job at the
// same port, or that comes from another process than the one that took the rank's seat, is refused.
struct StreamIdentity {
  std::string to_token;
  std::string from_token;
  int from = 0;
  int to = 0;
  int stream = 0;

  std::string text() const;
  static std::optional<StreamIdentity> parse(std::string_view text);
  friend bool operator==(const StreamIdentity&, const StreamIdentity&) = default;
};

// Not thread-safe. Failures are CommErrors that name the peer's address; what comes and is not TLS, or was changed on
// its way, is an InvalidArgument.
class TlsStream {
 public:
  // The stream of the side that connects.
  static TlsStream client(Socket socket, const Secret& secret, const StreamIdentity& identity);
  // The stream of the side that accepts; `expects` says whether a connection of this identity may come now.
  static TlsStream server(Socket socket, const Secret& secret, std::function<bool(const StreamIdentity&)> expects);
  TlsStream(TlsStream&&) noexcept;
  TlsStream& operator=(TlsStream&&) noexcept;
  ~TlsStream();

  enum class Step : uint8_t { kDone, kNeedsInput, kNeedsOutput };
  // Goes on with the handshake as far as it can without blocking.
  Step handshake();
  const StreamIdentity& identity() const;  // of a server: after the handshake

  // Encrypts the two parts, one after the other, into memory of its own; flush() sends it. Both together make one
  // record when they are small.
  void write(std::span<const std::byte> head, std::span<const std::byte> body = {});
  // Sends as much as the socket takes, or `most` bytes; true when nothing is left.
  bool flush(size_t most = SIZE_MAX);
  size_t unsent_bytes() const;

  static constexpr ptrdiff_t kEnd = -1;
  // How many bytes came: 0 when there are none at the moment, kEnd when the other side has closed.
  ptrdiff_t read(std::span<std::byte> into);
  // Whether read() would give bytes without looking at the socket: epoll does not tell of those.
  bool holds_input() const;

  int descriptor() const;
  const std::string& peer() const;
  void close();

 private:
  struct Impl;
  explicit TlsStream(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace chorale::transport
