#include <cstring>
#include <stdexcept>

#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/shm/group_segment.h"

namespace chorale::transport::shm {
namespace {

std::string head_of(MessageKind kind, uint64_t bytes, uint16_t flags) {
  MessageHead head;
  head.kind = kind;
  head.bytes = bytes;
  head.flags = flags;
  head.check = head.right_check();
  return {reinterpret_cast<const char*>(&head), sizeof head};
}

// Both as it came, and with a check that is right, so that the other checks are reached.
CHORALE_FUZZ(ShmMessages, {head_of(MessageKind::kInline, 100, 0), head_of(MessageKind::kReady, 1 << 30, kIsParcel),
                           head_of(MessageKind::kTaken, 0, kHasCrc)}) {
  CHORALE_CHECK(input.size() >= sizeof(MessageHead), "too short");
  MessageHead head;
  std::memcpy(&head, input.data(), sizeof head);
  for (int round = 0; round < 2; ++round) {
    if (head.is_sound()) {
      const bool has_data = head.kind == MessageKind::kInline, is_parcel = (head.flags & kIsParcel) != 0;
      if (head.kind > MessageKind::kTaken || (has_data && head.bytes > (is_parcel ? 12 << 10 : 4 << 10)) ||
          (head.kind != MessageKind::kTaken && head.dtype >= kDTypeCount) ||
          head.lines() * kCacheLineBytes > sizeof(Message) + kCacheLineBytes - 1)
        throw std::logic_error("a message with an impossible head");
    }
    head.check = head.right_check();
  }
}

}  // namespace
}  // namespace chorale::transport::shm
