#include <cstring>
#include <memory>
#include <stdexcept>

#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/shm/group_segment.h"

namespace chorale::transport::shm {
namespace {

constexpr size_t kHeadBytes = offsetof(Message, data);

std::string head_of(MessageKind kind, uint64_t bytes, uint16_t flags) {
  const auto message = std::make_unique<Message>();
  message->kind = kind;
  message->bytes = bytes;
  message->flags = flags;
  message->check = message->right_check();
  return {reinterpret_cast<const char*>(message.get()), kHeadBytes};
}

// Both as it came, and with a check that is right, so that the other checks are reached.
CHORALE_FUZZ(ShmMessages, {head_of(MessageKind::kInline, 100, 0), head_of(MessageKind::kReady, 1 << 30, kIsParcel),
                           head_of(MessageKind::kTaken, 0, kHasCrc)}) {
  CHORALE_CHECK(input.size() >= kHeadBytes, "too short");
  const auto message = std::make_unique<Message>();
  std::memcpy(static_cast<void*>(message.get()), input.data(), kHeadBytes);
  for (int round = 0; round < 2; ++round) {
    if (message->is_sound()) {
      const bool has_data = message->kind == MessageKind::kInline;
      if (message->kind > MessageKind::kTaken || (has_data && message->bytes > sizeof message->data) ||
          (message->kind != MessageKind::kTaken && message->dtype >= kDTypeCount))
        throw std::logic_error("a message with an impossible head");
    }
    message->check = message->right_check();
  }
}

}  // namespace
}  // namespace chorale::transport::shm
