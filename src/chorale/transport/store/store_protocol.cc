#include "chorale/transport/store/store_protocol.h"

#include <cstring>

namespace chorale::transport {
namespace {

// Both are: kind in a byte, number in 8, count of words in 4, then each word's size in 4 and its bytes.
template <class Number>
void put(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

template <class Number>
bool take(std::string_view& bytes, Number& number) {
  if (bytes.size() < sizeof number) return false;
  std::memcpy(&number, bytes.data(), sizeof number);
  bytes.remove_prefix(sizeof number);
  return true;
}

std::string encode_parts(uint8_t kind, int64_t number, const std::vector<std::string>& words) {
  std::string bytes;
  put(bytes, kind);
  put(bytes, number);
  put(bytes, static_cast<uint32_t>(words.size()));
  for (const std::string& word : words) {
    put(bytes, static_cast<uint32_t>(word.size()));
    bytes += word;
  }
  return bytes;
}

bool decode_parts(std::string_view bytes, uint8_t& kind, int64_t& number, std::vector<std::string>& words) {
  uint32_t count = 0;
  if (!take(bytes, kind) || !take(bytes, number) || !take(bytes, count)) return false;
  if (count > bytes.size() / sizeof(uint32_t)) return false;  // before anything is allocated for them
  words.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t size = 0;
    if (!take(bytes, size) || size > bytes.size()) return false;
    words.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return bytes.empty();
}

bool has_its_words(const StoreRequest& request) {
  const size_t count = request.words.size();
  switch (request.call) {
    case StoreCall::kSet:
    case StoreCall::kWill:
      return count == 2;
    case StoreCall::kCompareSet:
      return count == 3;
    case StoreCall::kGet:
    case StoreCall::kContains:
    case StoreCall::kAdd:
    case StoreCall::kRemove:
    case StoreCall::kKeys:
      return count == 1;
    case StoreCall::kCount:
    case StoreCall::kWho:
      return count == 0;
    case StoreCall::kWait:
      return true;
  }
  return false;
}

}  // namespace

std::string encode(const StoreRequest& request) {
  return encode_parts(static_cast<uint8_t>(request.call), request.number, request.words);
}

std::string encode(const StoreReply& reply) {
  return encode_parts(static_cast<uint8_t>(reply.status), reply.number, reply.words);
}

std::optional<StoreRequest> decode_request(std::string_view bytes) {
  StoreRequest request{};
  uint8_t kind = 0;
  if (!decode_parts(bytes, kind, request.number, request.words)) return std::nullopt;
  request.call = static_cast<StoreCall>(kind);
  if (!has_its_words(request)) return std::nullopt;
  return request;
}

std::optional<StoreReply> decode_reply(std::string_view bytes) {
  StoreReply reply;
  uint8_t kind = 0;
  if (!decode_parts(bytes, kind, reply.number, reply.words)) return std::nullopt;
  if (kind > static_cast<uint8_t>(StoreStatus::kTimeout)) return std::nullopt;
  reply.status = static_cast<StoreStatus>(kind);
  return reply;
}

}  // namespace chorale::transport
