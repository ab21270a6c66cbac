#include "chorale/transport/shm/control_check.h"

#include <gtest/gtest.h>

#include <memory>

#include "chorale/transport/shm/group_segment.h"

namespace chorale::transport::shm {
namespace {

// A change of one byte by d adds d * 256^b * weight to the sum, whatever the words are. The upper 16 bits change for
// sure if that is at least 2^48 away from 0 on both sides.
TEST(ControlCheck, EveryChangeOfASingleByteShows) {
  for (const uint64_t weight : kCheckWeights) {
    for (int byte = 0; byte < 8; ++byte) {
      for (uint64_t difference = 1; difference < 256; ++difference) {
        const uint64_t change = (difference << (8 * byte)) * weight;
        EXPECT_GE(change, uint64_t{1} << 48) << weight << ' ' << byte << ' ' << difference;
        EXPECT_LE(change, ~uint64_t{0} - (uint64_t{1} << 48)) << weight << ' ' << byte << ' ' << difference;
      }
    }
  }
}

TEST(ControlCheck, SumsOfPartsAreThoseOfTheWhole) {
  EXPECT_EQ(weigh(1, 2, 3, 4) + weigh<4>(5, 6), weigh(1, 2, 3, 4, 5, 6));
  EXPECT_NE(weigh(1, 2), weigh(2, 1));
  EXPECT_NE(check_of(weigh(0, 0)), 0);
}

TEST(ControlCheck, EveryByteOfASlotsHeadIsCovered) {
  const auto slot = std::make_unique<CallSlot>();
  slot->number.store(7);
  slot->exposure = Exposure::kReadable;
  slot->call = {{0xffffffff00010105, 1000, 3, 0}};
  slot->place = Place::make(PlaceKind::kArena, 0x123456);
  slot->check = slot->right_check();
  auto* bytes = reinterpret_cast<std::byte*>(slot.get());
  for (size_t at = 0; at < offsetof(CallSlot, payload); ++at) {
    bytes[at] ^= std::byte{0x10};
    EXPECT_NE(slot->check, slot->right_check()) << at;
    bytes[at] ^= std::byte{0x10};
  }
  EXPECT_EQ(slot->check, slot->right_check());
}

TEST(ControlCheck, EveryByteOfAMessagesHeadIsCovered) {
  MessageHead head;
  head.kind = MessageKind::kReady;
  head.bytes = 12345;
  head.check = head.right_check();
  auto* bytes = reinterpret_cast<std::byte*>(&head);
  for (size_t at = 0; at < sizeof head; ++at) {
    bytes[at] ^= std::byte{0x01};
    EXPECT_NE(head.check, head.right_check()) << at;
    bytes[at] ^= std::byte{0x01};
  }
}

}  // namespace
}  // namespace chorale::transport::shm
