// How two ends of a connection prove to each other that they know the job's secret, and how their messages are then
// kept from being changed, repeated or reordered. Pure computation: the caller moves the bytes
// (transport/fabric/control_channel.h does so on a blocking socket).
//
//   client                                  server
//   hello: magic, purpose, nonce C    →
//                                     ←     challenge: nonce S
//   proof: MAC("client", …)           →                          checked before the server proves anything
//                                     ←     proof: MAC("server", …)
//
// Each MAC covers the side that makes it, the purpose of the connection and both nonces. So a proof cannot be reflected
// to its maker, used for another kind of connection, or replayed: one of its nonces is always fresh. The keys of the
// messages that follow come from the same values. Messages have fixed sizes, so there is no length that could lie.
//
// Without a secret the same exchange runs with an empty key and proves nothing: only for Unix sockets, where the kernel
// vouches for the user at the other end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "chorale/transport/security/secret.h"

namespace chorale::transport {

inline constexpr size_t kPurposeBytes = 16;
inline constexpr size_t kHelloBytes = 8 + kPurposeBytes + sizeof(Digest);
inline constexpr size_t kChallengeBytes = sizeof(Digest);
inline constexpr size_t kProofBytes = sizeof(Digest);

// One direction of an authenticated connection. Each message gets the MAC of its number, its size and its bytes.
class MessageMac {
 public:
  static constexpr size_t kBytes = 16;

  explicit MessageMac(const Digest& key) : key_(key) {}
  // The MAC of the next message.
  std::string next(std::string_view message);
  bool check_next(std::string_view message, std::string_view mac) { return equal_in_constant_time(next(message), mac); }

 private:
  Digest key_;
  uint64_t number_ = 0;
};

struct SessionMacs {
  MessageMac sending;
  MessageMac receiving;
};

// Both throw CommError when the other side does not follow or does not know the secret; the reason is fit for a log.
// `purpose` is a word of at most 16 characters ("store"): a server accepts its own only.
class ClientHandshake {
 public:
  ClientHandshake(const std::optional<Secret>& secret, std::string_view purpose);
  std::string hello() const { return transcript_.substr(0, kHelloBytes); }
  // The challenge in, the proof out.
  std::string answer(std::string_view challenge);
  // The server's proof in.
  SessionMacs finish(std::string_view proof) const;

 private:
  std::string key_;
  std::string transcript_;  // the hello, then the challenge
};

class ServerHandshake {
 public:
  ServerHandshake(const std::optional<Secret>& secret, std::string_view purpose);
  // The hello in, the challenge out.
  std::string challenge(std::string_view hello);
  // The client's proof in, the server's out.
  std::string answer(std::string_view proof) const;
  SessionMacs macs() const;

 private:
  std::string key_;
  std::string purpose_;
  std::string transcript_;  // as the client's
};

}  // namespace chorale::transport
