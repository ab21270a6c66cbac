#include "chorale/transport/shm/group_segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>

namespace chorale::transport::shm {
namespace {

// Sender and receiver in one thread, taking turns at random, from numbers of lines that are about to wrap around, too.
TEST(Mailbox, KeepsEveryMessageWholeUntilItIsRead) {
  const auto box = std::make_unique<Mailbox>();
  for (const uint32_t first : {uint32_t{0}, uint32_t{0} - 3 * kMailboxLines, uint32_t{0} - 100}) {
    box->filled = first;
    box->emptied = first;
    std::mt19937 random(first);
    std::deque<uint64_t> waiting;  // sizes of what is not read yet
    uint64_t sent = 0, read = 0, most = 0;
    const auto value_of = [](uint64_t nth) { return static_cast<std::byte>(nth * 37 % 251 + 1); };
    while (read < 20'000) {
      const bool sends = random() % 2 == 0;
      for (auto turns = random() % 300; turns > 0; --turns) {
        if (sends) {
          const uint64_t bytes = random() % 3 == 0 ? random() % 64 : random() % (kParcelInlineBytes + 1);
          const uint32_t end = Mailbox::after(box->filled, MessageHead::lines_for(bytes));
          if (!Mailbox::can_hold(box->emptied, end)) break;
          Message& message = box->at(box->filled);
          ASSERT_LE(reinterpret_cast<std::byte*>(message.data + bytes), box->ring + sizeof box->ring);
          message.head = {};
          message.head.id = sent;
          message.head.bytes = bytes;
          message.head.flags = kIsParcel;
          message.head.check = message.head.right_check();
          std::fill_n(message.data, bytes, value_of(sent));
          waiting.push_back(bytes);
          ++sent;
          box->filled = end;
          most = std::max<uint64_t>(most, waiting.size());
        } else {
          if (box->filled == box->emptied) break;
          const Message& message = box->at(box->emptied);
          const MessageHead head = message.copy_of_head();
          ASSERT_TRUE(head.is_sound());
          ASSERT_EQ(head.id, read);
          ASSERT_EQ(head.bytes, waiting.front());
          ASSERT_TRUE(std::all_of(message.data, message.data + head.bytes, [&](std::byte b) {
            return b == value_of(read);
          })) << read;
          waiting.pop_front();
          ++read;
          box->emptied = Mailbox::after(box->emptied, head.lines());
        }
      }
    }
    EXPECT_EQ(waiting.empty(), box->filled == box->emptied);
    EXPECT_GT(most, 25u);  // it has been full
  }
}

TEST(Mailbox, NumbersThatHavePassedEachOtherAreNotBelieved) {
  EXPECT_TRUE(Mailbox::can_hold(5, 5));
  EXPECT_TRUE(Mailbox::can_hold(uint32_t{0} - 5, kMailboxLines - 5));
  EXPECT_FALSE(Mailbox::can_hold(5, kMailboxLines + 6));
  EXPECT_FALSE(Mailbox::can_hold(6, 5));
}

}  // namespace
}  // namespace chorale::transport::shm
