// The messages between a store's server and its clients.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/transport/store/store.h"

namespace chorale::transport {

// The purpose of the connection (transport/security/handshake.h).
inline constexpr std::string_view kStorePurpose = "store";
// The largest message has two values: compare_set's.
inline constexpr size_t kMaxStoreMessageBytes = 2 * kMaxStoreValueBytes + kMaxStoreKeyBytes + 64;

// One request at a time on a connection, each answered by one reply.
enum class StoreCall : uint8_t { kSet, kGet, kWait, kContains, kAdd, kCompareSet, kRemove, kKeys, kCount, kWill, kWho };
enum class StoreStatus : uint8_t {
  kOk,
  kInvalid,  // words: what is wrong with the request
  kTimeout,  // words: the keys that are still missing
};

// kWho: a word that tells this server from all others. kWill: the server sets the key to the value when this connection
// ends, however it ends. words: the key or the keys, then the values. number: what to add; for kGet and kWait how many
// milliseconds to wait at most, negative for ever.
struct StoreRequest {
  StoreCall call;
  int64_t number = 0;
  std::vector<std::string> words;
};
struct StoreReply {
  StoreStatus status = StoreStatus::kOk;
  int64_t number = 0;
  std::vector<std::string> words;
};

std::string encode(const StoreRequest& request);
std::string encode(const StoreReply& reply);
// Nothing when the bytes are not such a message, whole and with the words that its call needs.
std::optional<StoreRequest> decode_request(std::string_view bytes);
std::optional<StoreReply> decode_reply(std::string_view bytes);

}  // namespace chorale::transport
