#include "chorale/transport/security/handshake.h"

#include <array>
#include <bit>
#include <cstring>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers travel in little-endian order");

constexpr std::string_view kMagic = "CHORALE1";

// Every use of the key has its own label, all of one size.
using Label = std::string_view;
constexpr Label kClientProof = "client proves";
constexpr Label kServerProof = "server proves";
constexpr Label kClientKey = "client writes";
constexpr Label kServerKey = "server writes";

std::string padded(std::string_view purpose) {
  CHORALE_CHECK(!purpose.empty() && purpose.size() <= kPurposeBytes, "[handshake] a purpose has 1 to ", kPurposeBytes,
                " characters, not '", purpose, "'");
  std::string field(purpose);
  field.resize(kPurposeBytes, '\0');
  return field;
}

std::string key_of(const std::optional<Secret>& secret) { return secret ? std::string(secret->bytes()) : ""; }

Digest derive(const std::string& key, Label label, const std::string& transcript) {
  return hmac_sha256(key, {label, transcript});
}

}  // namespace

std::string MessageMac::next(std::string_view message) {
  const std::array<uint64_t, 2> header{number_++, message.size()};
  std::array<char, sizeof header> bytes;
  std::memcpy(bytes.data(), header.data(), sizeof header);
  return std::string(view(hmac_sha256(view(key_), {{bytes.data(), bytes.size()}, message})).substr(0, kBytes));
}

ClientHandshake::ClientHandshake(const std::optional<Secret>& secret, std::string_view purpose)
    : key_(key_of(secret)), transcript_(std::string(kMagic) + padded(purpose) + std::string(view(random_bytes()))) {}

std::string ClientHandshake::answer(std::string_view challenge) {
  if (challenge.size() != kChallengeBytes) throw CommError("[handshake] the challenge has a wrong size");
  transcript_ += challenge;
  return std::string(view(derive(key_, kClientProof, transcript_)));
}

SessionMacs ClientHandshake::finish(std::string_view proof) const {
  if (!equal_in_constant_time(proof, view(derive(key_, kServerProof, transcript_)))) {
    throw CommError("[handshake] the server does not know the secret of this job");
  }
  return {MessageMac(derive(key_, kClientKey, transcript_)), MessageMac(derive(key_, kServerKey, transcript_))};
}

ServerHandshake::ServerHandshake(const std::optional<Secret>& secret, std::string_view purpose)
    : key_(key_of(secret)), purpose_(padded(purpose)) {}

std::string ServerHandshake::challenge(std::string_view hello) {
  if (hello.size() != kHelloBytes || !hello.starts_with(kMagic)) throw CommError("[handshake] no hello of ours");
  if (hello.substr(kMagic.size(), kPurposeBytes) != purpose_) {
    throw CommError("[handshake] the hello is meant for another kind of server");
  }
  const std::string nonce(view(random_bytes()));
  transcript_ = std::string(hello) + nonce;
  return nonce;
}

std::string ServerHandshake::answer(std::string_view proof) const {
  CHORALE_INVARIANT(!transcript_.empty(), "a proof before the hello");
  if (!equal_in_constant_time(proof, view(derive(key_, kClientProof, transcript_)))) {
    throw CommError("[handshake] the client does not know the secret of this job");
  }
  return std::string(view(derive(key_, kServerProof, transcript_)));
}

SessionMacs ServerHandshake::macs() const {
  return {MessageMac(derive(key_, kServerKey, transcript_)), MessageMac(derive(key_, kClientKey, transcript_))};
}

}  // namespace chorale::transport
