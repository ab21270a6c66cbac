#include "chorale/comm/notice.h"

#include <cstring>
#include <type_traits>

namespace chorale::comm {
namespace {

constexpr size_t kMostText = 2048;

// Followed by the text.
struct Head {
  Notice::Kind kind;
  int32_t whom;
  uint64_t number;
  Fingerprint::Words print;
};
static_assert(sizeof(Head) == 48 && std::is_trivially_copyable_v<Head>);

}  // namespace

std::string encode(const Notice& notice) {
  const Head head{notice.kind, notice.whom, notice.number, notice.print.words()};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes += std::string_view(notice.text).substr(0, kMostText);
  return bytes;
}

std::optional<Notice> decode_notice(std::string_view bytes) {
  Head head;
  if (bytes.size() < sizeof(head) || bytes.size() > sizeof(head) + kMostText) return std::nullopt;
  std::memcpy(static_cast<void*>(&head), bytes.data(), sizeof(head));
  if (head.kind > Notice::Kind::kAnswer) return std::nullopt;
  return Notice{head.kind, head.whom, head.number, Fingerprint::of(head.print),
                std::string(bytes.substr(sizeof(head)))};
}

}  // namespace chorale::comm
