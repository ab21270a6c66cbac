// What a fabric notices of its peers' lives and of peers that misbehave. Rank 0 is a fabric; rank 1 is a puppet that
// holds the bare connections and does with them what the test says.
#include "chorale/transport/fabric/control_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <thread>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/fabric/control_frame.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/fabric/frame.h"
#include "chorale/transport/tls/tls_fabric.h"
#include "chorale/transport/tls/tls_join.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;
using State = Life::State;

constexpr auto kKeepAlive = 400ms;
// Streams from rank 1 to rank 0, and back (tls_fabric.cc).
constexpr size_t kControl = 0, kShorts = 2, kBulk = 4, kShortsBack = 1, kBulkBack = 3;

FabricOptions options() {
  FabricOptions made = test_options(0);
  made.keep_alive = kKeepAlive;
  made.streams = 1;
  return made;
}

class PuppetTest : public testing::Test {
 protected:
  void SetUp() override {
    TlsJoin join = [] {
      FabricOptions own = options();
      own.rank = 1;
      return TlsJoin(own, "127.0.0.1");
    }();
    const auto builder = make_tls_fabric(options(), "127.0.0.1");
    const std::vector<FabricAddress> addresses{{1, builder->address().endpoint, {}}, {2, join.endpoint(), {}}};
    auto connecting = std::async(std::launch::async, [&] { return builder->connect(addresses, soon()); });
    puppet_ = std::move(join.meet(addresses, 5, soon()).at(0));
    fabric_ = connecting.get();
  }

  void say(size_t stream, std::string_view bytes) {
    puppet_[stream].write({}, std::as_bytes(std::span(bytes)));
    const Deadline deadline = soon();
    while (!puppet_[stream].flush()) ASSERT_FALSE(deadline.passed());
  }
  void say(ControlKind kind, std::string_view body = {}) { say(kControl, encode_control_frame(kind, body)); }
  void say(size_t stream, const Frame& frame, std::string_view body = {}) {
    const Frame sealed = seal(frame);
    say(stream, std::string(reinterpret_cast<const char*>(&sealed), sizeof sealed).append(body));
  }
  static Frame frame(FrameKind kind, uint64_t bytes, uint64_t id = 0) {
    Frame made;
    made.kind = kind;
    made.bytes = bytes;
    made.id = id;
    return made;
  }
  void hear(size_t stream, std::span<std::byte> into) {
    const Deadline deadline = soon();
    while (!into.empty() && !deadline.passed()) {
      const ptrdiff_t n = puppet_[stream].read(into);
      ASSERT_GE(n, 0);
      into = into.subspan(static_cast<size_t>(n));
    }
    ASSERT_TRUE(into.empty());
  }
  // The next frame, with its body.
  std::pair<Frame, Bytes> hear_frame(size_t stream) {
    std::array<std::byte, kFrameBytes> head;
    hear(stream, head);
    const Frame heard = parse_frame(head);
    Bytes body(body_bytes(heard));
    hear(stream, body);
    return {heard, body};
  }
  // All connections end, without a word.
  void die() { puppet_.clear(); }

  Life await(State state) { return await_life(*fabric_, 1, state); }
  void expect_nonsense(const char* why) {
    const Life life = await(State::kLost);
    EXPECT_THAT(life.text, HasSubstr(why));
  }

  std::vector<TlsStream> puppet_;
  std::unique_ptr<Fabric> fabric_;
};

TEST_F(PuppetTest, APeerThatSaysNothingIsSilentUntilItSpeaks) {
  EXPECT_EQ(fabric_->life(1).state, State::kConnected);
  const auto before = std::chrono::steady_clock::now();
  const Life silent = await(State::kSilent);
  EXPECT_GE(std::chrono::steady_clock::now() - before, kKeepAlive / 2);
  EXPECT_THAT(silent.text, HasSubstr("silent for "));
  EXPECT_FALSE(silent.gone());
  // A stopped process acknowledges: it is not lost, however long it takes.
  std::this_thread::sleep_for(3 * kKeepAlive);
  EXPECT_EQ(fabric_->life(1).state, State::kSilent);
  const std::array<uint64_t, 8> status{1, 2, 3, 4, 5, 6, 7, 8};
  say(ControlKind::kStatus, {reinterpret_cast<const char*>(status.data()), sizeof status});
  EXPECT_EQ(await(State::kConnected).status, status);
}

TEST_F(PuppetTest, APeerThatSaysGoodbyeHasLeft) {
  Bytes into(8);
  const auto receive = fabric_->receive(1, 1, into), any = fabric_->receive(Fabric::kAnySource, 1, into);
  const Bytes large(100000);
  const auto send = fabric_->send(1, 1, {}, large);
  say(ControlKind::kGoodbye);
  die();
  const Life life = await(State::kLeft);
  EXPECT_TRUE(life.gone());
  for (const auto& transfer : {receive, send, fabric_->receive(1, 1, into), fabric_->send(1, 1, {}, into)}) {
    await_end(*fabric_, transfer);
    EXPECT_EQ(transfer->state(), Transfer::State::kFailed);
    EXPECT_EQ(transfer->error, life.text);
  }
  EXPECT_TRUE(any->pending()) << "another may still send";
}

TEST_F(PuppetTest, APeerThatEndsWithoutAWordIsLostAtOnce) {
  Bytes into(8);
  const auto receive = fabric_->receive(1, 1, into);
  die();
  await_end(*fabric_, receive, within(kKeepAlive));
  EXPECT_EQ(receive->state(), Transfer::State::kFailed);
  EXPECT_THAT(fabric_->life(1).text, HasSubstr("ended: killed, crashed or exited"));
  EXPECT_EQ(fabric_->life(1).state, State::kLost);
}

TEST_F(PuppetTest, WhatAPeerSentBeforeItDiedIsReceived) {
  Bytes early(3), late(3);
  for (int i = 0; i < 2; ++i) say(kShorts, frame(FrameKind::kEager, 3), "abc");
  const auto first = fabric_->receive(1, 0, early);
  die();
  await(State::kLost);
  await_done(*fabric_, first);
  await_done(*fabric_, fabric_->receive(1, 0, late));
  EXPECT_EQ(late[2], std::byte{'c'});
  const auto third = fabric_->receive(1, 0, late);
  EXPECT_EQ(third->state(), Transfer::State::kFailed);
}

TEST_F(PuppetTest, AHalfMessageOfADeadPeerFailsItsReceive) {
  Bytes into(10);
  const auto small = fabric_->receive(1, 0, into);
  say(kShorts, frame(FrameKind::kEager, 10), "half");
  std::this_thread::sleep_for(20ms);
  die();
  await_end(*fabric_, small);
  EXPECT_EQ(small->state(), Transfer::State::kFailed);
}

TEST_F(PuppetTest, AReceiveThatIsCancelledHalfwayStoresNothingMore) {
  Bytes into(200000), next(3);
  const auto receive = fabric_->receive(1, 0, into);
  say(kShorts, frame(FrameKind::kAnnounce, into.size(), 1));
  EXPECT_EQ(hear_frame(kShortsBack).first.kind, FrameKind::kReady);
  say(kBulk, frame(FrameKind::kChunk, 100000, 1), std::string(50000, 'x'));
  const Deadline deadline = soon();
  volatile const std::byte* first = into.data();
  while (*first != std::byte{'x'} && !deadline.passed()) std::this_thread::yield();
  EXPECT_TRUE(fabric_->cancel(receive));
  EXPECT_EQ(receive->state(), Transfer::State::kFailed);
  EXPECT_EQ(into[0], std::byte{'x'});
  into.assign(into.size(), std::byte{'-'});
  say(kBulk, std::string(50000, 'x'));
  Frame rest = frame(FrameKind::kChunk, 100000, 1);
  rest.offset = 100000;
  say(kBulk, rest, std::string(100000, 'x'));
  // What comes next is not disturbed.
  say(kShorts, frame(FrameKind::kEager, 3), "abc");
  await_done(*fabric_, fabric_->receive(1, 0, next));
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(into, Bytes(into.size(), std::byte{'-'}));
  EXPECT_EQ(fabric_->life(1).state, State::kConnected);
}

TEST_F(PuppetTest, TheMemoryOfASendThatIsCancelledHalfwayIsNotReadAnyMore) {
  const Bytes original = pattern(32 << 20, 1);
  Bytes data = original;
  const auto send = fabric_->send(1, 0, {}, data);
  EXPECT_EQ(hear_frame(kShortsBack).first.kind, FrameKind::kAnnounce);
  say(kShorts, frame(FrameKind::kReady, 0, 1));
  // The connection is full by then: nobody reads.
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(send->pending());
  EXPECT_TRUE(fabric_->cancel(send));
  data.assign(data.size(), std::byte{0xee});
  size_t got = 0;
  while (true) {
    const auto [head, body] = hear_frame(kBulkBack);
    ASSERT_EQ(head.offset, got);
    got += head.bytes;
    if (head.kind == FrameKind::kFiller) break;
    ASSERT_TRUE(std::equal(body.begin(), body.end(), original.begin() + static_cast<ptrdiff_t>(head.offset)));
  }
  EXPECT_EQ(got, data.size());
}

TEST_F(PuppetTest, AMessageThatItsSenderTakesBackHalfwayFailsItsReceive) {
  for (const FrameKind kind : {FrameKind::kWithdraw, FrameKind::kFiller}) {
    const uint64_t id = kind == FrameKind::kWithdraw ? 1 : 2;
    Bytes into(200000);
    const auto receive = fabric_->receive(1, 0, into);
    say(kShorts, frame(FrameKind::kAnnounce, into.size(), id));
    if (kind == FrameKind::kWithdraw) {
      say(kShorts, frame(kind, 0, id));
    } else {
      EXPECT_EQ(hear_frame(kShortsBack).first.kind, FrameKind::kReady);  // of the first message
      EXPECT_EQ(hear_frame(kShortsBack).first.id, id);
      say(kBulk, frame(FrameKind::kChunk, 100000, id), std::string(100000, 'x'));
      Frame rest = frame(kind, 100000, id);
      rest.offset = 100000;
      say(kBulk, rest);
    }
    await_end(*fabric_, receive);
    EXPECT_EQ(receive->state(), Transfer::State::kFailed);
    EXPECT_THAT(receive->error, HasSubstr("rank 1 took its message back"));
    EXPECT_EQ(fabric_->life(1).state, State::kConnected);
  }
}

TEST_F(PuppetTest, ADataConnectionThatBreaksAloneIsALoss) {
  puppet_[kBulk].close();
  EXPECT_THAT(await(State::kLost).text, HasSubstr("closed its connections"));
}

TEST_F(PuppetTest, GarbageOnADataConnectionIsALoss) {
  say(kShorts, std::string(200, 'x'));
  expect_nonsense("damaged");
}

TEST_F(PuppetTest, GarbageOnTheControlConnectionIsALoss) {
  say(kControl, std::string(200, 'x'));
  expect_nonsense("a control frame of kind");
}

TEST_F(PuppetTest, AControlFrameOfWhichAnyBitIsWrongIsALoss) {
  std::string notice = encode_control_frame(ControlKind::kNotice, "group 7 has failed");
  notice.back() = static_cast<char>(notice.back() ^ 0x10);
  std::atomic<bool> heard{false};
  fabric_->on_notice([&](int, std::string_view) { heard = true; });
  say(kControl, notice);
  expect_nonsense("a control frame is damaged");
  EXPECT_FALSE(heard);
}

TEST_F(PuppetTest, TooLongASmallMessageIsALoss) {
  say(kShorts, frame(FrameKind::kEager, Fabric::kEagerBytes + 1));
  expect_nonsense("at most 65536");
}

TEST_F(PuppetTest, TooLongANoticeIsALoss) {
  say(kControl, fuzz::bytes_of(static_cast<uint32_t>(ControlKind::kNotice), uint32_t{kMaxNoticeBytes + 1}, 0U));
  expect_nonsense("and 4097 bytes");
}

TEST_F(PuppetTest, AChunkThatNobodyAskedForIsALoss) {
  say(kBulk, frame(FrameKind::kChunk, 10, 1));
  expect_nonsense("nobody asked for");
}

TEST_F(PuppetTest, AChunkOutsideItsMessageIsALoss) {
  Bytes into(100000);
  const auto receive = fabric_->receive(1, 0, into);
  say(kShorts, frame(FrameKind::kAnnounce, into.size(), 1));
  EXPECT_EQ(hear_frame(kShortsBack).first.kind, FrameKind::kReady);
  Frame chunk = frame(FrameKind::kChunk, 10, 1);
  chunk.offset = into.size() - 9;
  say(kBulk, chunk);
  expect_nonsense("sent 10 bytes at 99991 of a message of 100000");
  EXPECT_EQ(receive->state(), Transfer::State::kFailed);
}

TEST_F(PuppetTest, MoreThanItsCreditIsALoss) {
  const std::string body(Fabric::kEagerBytes, 'x');
  size_t sent = 0;
  for (; sent + body.size() < kCreditBytes; sent += body.size()) {
    say(kShorts, frame(FrameKind::kEager, body.size()), body);
  }
  // The frame comes without its bytes: nobody may be there to take them. The frames themselves cost credit, too.
  EXPECT_EQ(sent + body.size(), kCreditBytes);
  say(kShorts, frame(FrameKind::kEager, body.size()));
  expect_nonsense("more than it has credit for");
}

TEST_F(PuppetTest, APayloadWithAWrongChecksumIsALoss) {
  Frame wrong = frame(FrameKind::kEager, 3);
  wrong.has_checksum = 1;
  wrong.checksum = 12345;
  say(kShorts, wrong, "abc");
  expect_nonsense("checksum is wrong");
}

TEST(Lives, NoticesAreHeardEvenIfNobodyListenedYet) {
  auto fabrics = connect_tls_ranks(3, options());
  const std::vector<int> peers{1, 2};
  fabrics[0]->tell(peers, "early");
  std::this_thread::sleep_for(50ms);
  fabrics[0]->tell(std::vector<int>{1}, "second");
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> heard;
  for (const int rank : peers) {
    fabrics[static_cast<size_t>(rank)]->on_notice([&, rank](int from, std::string_view notice) {
      const std::lock_guard lock(mutex);
      heard.push_back(std::to_string(rank) + " from " + std::to_string(from) + ": " + std::string(notice));
      changed.notify_all();
    });
  }
  const std::string longest(kMaxNoticeBytes, 'n');
  fabrics[1]->tell(std::vector<int>{2}, longest);
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_for(lock, 20s, [&] { return heard.size() == 4; }));
  EXPECT_THAT(heard, testing::UnorderedElementsAre("1 from 0: early", "2 from 0: early", "1 from 0: second",
                                                   "2 from 1: " + longest));
}

TEST(Lives, StatusTravelsWithTheHeartbeat) {
  auto fabrics = connect_tls_ranks(2, options());
  const std::array<uint64_t, 8> status{9, 8, 7, 6, 5, 4, 3, 2};
  fabrics[0]->set_status(status);
  const Deadline deadline = soon();
  while (fabrics[1]->life(0).status != status && !deadline.passed()) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(fabrics[1]->life(0).status, status);
  EXPECT_EQ(fabrics[1]->life(0).state, State::kConnected);
}

TEST(Lives, ARankThatEndsAfterItsLastMessageHasDeliveredIt) {
  auto fabrics = connect_tls_ranks(3, options());
  const Bytes data = pattern(60000, 1);
  for (int i = 0; i < 40; ++i) fabrics[0]->send(1, 1, {}, data);
  fabrics[0].reset();
  for (int i = 0; i < 40; ++i) {
    Bytes into(data.size());
    await_done(*fabrics[1], fabrics[1]->receive(0, 1, into));
    ASSERT_EQ(into, data);
  }
  EXPECT_THAT(await_life(*fabrics[1], 0, State::kLeft).text, HasSubstr("left"));
  await_life(*fabrics[2], 0, State::kLeft);
  // The others are not disturbed.
  EXPECT_EQ(fabrics[1]->life(2).state, State::kConnected);
  Bytes into(data.size());
  fabrics[2]->send(1, 1, {}, data);
  await_done(*fabrics[1], fabrics[1]->receive(2, 1, into));
}

TEST(Lives, WakeEndsAWait) {
  auto fabrics = connect_tls_ranks(2, options());
  const uint32_t seen = fabrics[0]->events();
  std::thread waker([&] { fabrics[0]->wake(); });
  fabrics[0]->await_event(seen, soon());
  EXPECT_NE(fabrics[0]->events(), seen);
  waker.join();
}

}  // namespace
}  // namespace chorale::transport
