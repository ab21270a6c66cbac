// Messages between ranks over each fabric: what arrives, where, and in which order. Ranks are threads.
#include "chorale/transport/fabric/fabric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/fabric/frame.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

class FabricRanks : public testing::TestWithParam<std::tuple<const char*, int>> {};

// Every pair, both directions, all sizes at once.
TEST_P(FabricRanks, MessagesOfAnySizeArriveWhole) {
  const auto [name, size] = GetParam();
  CHORALE_SKIP_WITHOUT_FABRIC(name);
  const auto fabrics = connect_ranks_over(name, size);
  constexpr std::array<size_t, 10> kSizes{
      0, 1, 17, 4096, 16 << 10, Fabric::kEagerBytes, Fabric::kEagerBytes + 1, kChunkBytes, 1000003, 5 << 20};
  const auto exchange = [&, ranks = size](int rank) {
    struct Pair {
      int peer;
      size_t i;
      Bytes data, into;
      TransferHandle sent, received;
    };
    const auto seed = [](int from, int to, size_t i) { return static_cast<uint64_t>(from * 100 + to * 10) + i * 1000; };
    Fabric& fabric = *fabrics[static_cast<size_t>(rank)];
    std::vector<Pair> pairs;
    for (int peer = 0; peer < ranks; ++peer) {
      for (size_t i = 0; peer != rank && i < kSizes.size(); ++i) {
        pairs.push_back({peer, i, pattern(kSizes[i], seed(rank, peer, i)), Bytes(kSizes[i]), {}, {}});
      }
    }
    for (Pair& pair : pairs) {
      pair.sent = fabric.send(pair.peer, 7, envelope(pair.i), pair.data);
      pair.received = fabric.receive(pair.peer, 7, pair.into);
    }
    for (const Pair& pair : pairs) {
      await_done(fabric, pair.sent);
      await_done(fabric, pair.received);
      EXPECT_EQ(pair.received->source, pair.peer);
      EXPECT_EQ(pair.received->bytes, kSizes[pair.i]);
      EXPECT_EQ(pair.received->envelope, envelope(pair.i));
      EXPECT_TRUE(pair.into == pattern(kSizes[pair.i], seed(pair.peer, rank, pair.i)))
          << kSizes[pair.i] << " bytes from " << pair.peer;
    }
  };
  std::vector<std::thread> ranks;
  ranks.reserve(fabrics.size());
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(exchange, rank);
  for (std::thread& rank : ranks) rank.join();
}
INSTANTIATE_TEST_SUITE_P(Fabrics, FabricRanks,
                         testing::Combine(testing::ValuesIn(kFabricNames), testing::Values(2, 3, 5)),
                         [](const auto& one) { return concat(std::get<0>(one.param), std::get<1>(one.param)); });

class FabricTest : public FabricPair, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { CHORALE_SKIP_WITHOUT_FABRIC(GetParam()); }
  void connect(int size = 2, const FabricOptions& options = test_options(0)) {
    fabrics_ = connect_ranks_over(GetParam(), size, options);
  }
};
INSTANTIATE_TEST_SUITE_P(Fabrics, FabricTest, testing::ValuesIn(kFabricNames),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(FabricTest, SaysItsName) {
  connect();
  EXPECT_STREQ(a().name(), GetParam());
}

TEST_P(FabricTest, MessagesOfAChannelKeepTheirOrder) {
  connect();
  constexpr size_t kCount = 2000, kAskedBefore = 600;
  // Small and large ones; some are asked for before they are sent, and some after.
  std::vector<Bytes> data, into;
  std::vector<TransferHandle> sent, received;
  for (size_t i = 0; i < kCount; ++i) {
    data.push_back(pattern(i % 50 == 0 ? 100000 : i % 7, i));
    into.emplace_back(data[i].size());
  }
  for (size_t i = 0; i < kAskedBefore; ++i) received.push_back(b().receive(0, 5, into[i]));
  for (size_t i = 0; i < kCount; ++i) sent.push_back(a().send(1, 5, envelope(i), data[i]));
  for (size_t i = kAskedBefore; i < kCount; ++i) received.push_back(b().receive(0, 5, into[i]));
  for (size_t i = 0; i < kCount; ++i) {
    await_done(b(), received[i]);
    await_done(a(), sent[i]);
    ASSERT_EQ(received[i]->envelope, envelope(i));
    ASSERT_TRUE(into[i] == data[i]) << i;
  }
}

TEST_P(FabricTest, ChannelsAreIndependent) {
  connect();
  const Bytes large = pattern(300000, 1), small = pattern(10, 2);
  Bytes into_large(large.size()), into_small(small.size());
  const auto sent_large = a().send(1, 1, envelope(1), large);
  const auto sent_small = a().send(1, 2, envelope(2), small);
  await_done(b(), b().receive(0, 2, into_small));
  EXPECT_EQ(into_small, small);
  EXPECT_TRUE(sent_large->pending());
  await_done(b(), b().receive(0, 1, into_large));
  await_done(a(), sent_large);
  await_done(a(), sent_small);
  EXPECT_EQ(into_large, large);
}

// More than the receiver keeps: the rest waits at the sender, and other channels are not held up.
TEST_P(FabricTest, ManyMessagesThatNobodyAsksForDoNotBlockOthers) {
  connect();
  constexpr size_t kCount = 100;
  static_assert(kCount * Fabric::kEagerBytes > kCreditBytes);
  const Bytes data = pattern(Fabric::kEagerBytes, 3), small = pattern(10, 2);
  std::vector<TransferHandle> sent;
  for (size_t i = 0; i < kCount; ++i) sent.push_back(a().send(1, 1, envelope(i), data));
  EXPECT_TRUE(sent.back()->pending());
  Bytes into_small(small.size());
  const auto sent_small = a().send(1, 2, envelope(0), small);
  await_done(b(), b().receive(0, 2, into_small));
  await_done(a(), sent_small);
  EXPECT_EQ(into_small, small);
  for (size_t i = 0; i < kCount; ++i) {
    Bytes into(data.size());
    const auto received = b().receive(0, 1, into);
    await_done(b(), received);
    ASSERT_EQ(received->envelope, envelope(i));
    ASSERT_EQ(into, data);
    await_done(a(), sent[i]);
  }
  // The credit is back: a small message goes at once again, though nobody asks for it.
  await_done(a(), a().send(1, 1, envelope(0), data));
}

TEST_P(FabricTest, AnySourceTakesTheMessageThatComesFirst) {
  connect(3);
  for (const size_t bytes : {size_t{8}, size_t{200000}}) {
    std::array<Bytes, 2> into{Bytes(bytes), Bytes(bytes)};
    const auto first = fabrics_[0]->receive(Fabric::kAnySource, 4, into[0]);
    const auto second = fabrics_[0]->receive(Fabric::kAnySource, 4, into[1]);
    const Bytes of_two = pattern(bytes, 2), of_one = pattern(bytes, 1);
    const auto sent_by_two = fabrics_[2]->send(0, 4, envelope(2), of_two);
    await_done(*fabrics_[0], first);
    const auto sent_by_one = fabrics_[1]->send(0, 4, envelope(1), of_one);
    await_done(*fabrics_[0], second);
    EXPECT_EQ(first->source, 2);
    EXPECT_EQ(into[0], of_two);
    EXPECT_EQ(second->source, 1);
    EXPECT_EQ(into[1], of_one);
    await_done(*fabrics_[2], sent_by_two);
    await_done(*fabrics_[1], sent_by_one);
  }
}

TEST_P(FabricTest, AMessageOfAnotherSizeIsReportedAndNotStored) {
  connect();
  for (const size_t bytes : {size_t{8}, size_t{0}, size_t{200000}}) {
    for (const bool asked_first : {true, false}) {
      const Bytes data = pattern(bytes, 1), before = pattern(100, 9);
      Bytes into = before;
      TransferHandle received;
      if (asked_first) received = b().receive(0, 1, into);
      const auto sent = a().send(1, 1, envelope(1), data);
      if (!asked_first) std::this_thread::sleep_for(20ms);
      if (!asked_first) received = b().receive(0, 1, into);
      await_done(b(), received);
      await_done(a(), sent);
      EXPECT_EQ(received->bytes, bytes);
      EXPECT_EQ(into, before);
    }
  }
}

TEST_P(FabricTest, ACancelledReceiveLeavesItsMemoryAndTheMessageAlone) {
  connect();
  for (const size_t bytes : {size_t{8}, size_t{200000}}) {
    const Bytes data = pattern(bytes, 1), before = pattern(bytes, 9);
    Bytes into = before, other(bytes);
    const auto received = b().receive(0, 1, into);
    EXPECT_TRUE(b().cancel(received));
    EXPECT_FALSE(b().cancel(received));
    EXPECT_EQ(received->state(), Transfer::State::kFailed);
    const auto sent = a().send(1, 1, envelope(1), data);
    await_done(b(), b().receive(0, 1, other));
    await_done(a(), sent);
    EXPECT_EQ(other, data);
    EXPECT_EQ(into, before);
  }
}

TEST_P(FabricTest, AReceiveThatIsCancelledHalfwayStoresNothingMore) {
  // The message takes a tenth of a second or more, which UCX would get to end it by itself. Where other programs have
  // the cores, it may come whole before it can be cancelled: then the next one is tried.
  FabricOptions options = test_options(0);
  options.time_to_cancel = 5ms;
  connect(2, options);
  const Bytes data(256 << 20, std::byte{1});
  Bytes into(data.size());
  bool cancelled = false;
  for (int attempt = 0; !cancelled && attempt < 20; ++attempt) {
    std::ranges::fill(into, std::byte{0});
    const auto received = b().receive(0, 1, into);
    const auto sent = a().send(1, 1, envelope(1), data);
    const Deadline deadline = soon();
    volatile const std::byte* first = into.data();
    while (*first == std::byte{0} && !deadline.passed()) std::this_thread::yield();
    cancelled = b().cancel(received);
    if (cancelled) {
      const Bytes at_cancel = into;
      await_end(a(), sent);
      std::this_thread::sleep_for(50ms);
      EXPECT_TRUE(into == at_cancel);
    } else {
      await_done(b(), received);
      await_done(a(), sent);
    }
  }
  EXPECT_TRUE(cancelled);
}

TEST_P(FabricTest, ASendThatIsCancelledBeforeAnybodyAskedIsWithdrawn) {
  connect();
  const Bytes data = pattern(200000, 1), next = pattern(50, 2);
  const auto sent = a().send(1, 1, envelope(1), data);
  EXPECT_TRUE(a().cancel(sent));
  a().send(1, 1, envelope(2), next);
  std::this_thread::sleep_for(50ms);
  Bytes into(next.size());
  const auto received = b().receive(0, 1, into);
  await_done(b(), received);
  EXPECT_EQ(received->envelope, envelope(2));
  EXPECT_EQ(into, next);
}

TEST_P(FabricTest, APeerThatLeavesIsNoticedAfterItsLastMessage) {
  FabricOptions options = test_options(0);
  options.keep_alive = 400ms;
  connect(2, options);
  const Bytes data = pattern(1000, 1);
  Bytes into(data.size()), never(10);
  a().send(1, 1, envelope(1), data);
  const auto hopeless = b().receive(0, 2, never);
  fabrics_[0].reset();
  await_done(b(), b().receive(0, 1, into));
  EXPECT_EQ(into, data);
  await_end(b(), hopeless);
  EXPECT_EQ(hopeless->state(), Transfer::State::kFailed);
  EXPECT_EQ(hopeless->error, await_life(b(), 0, Life::State::kLeft).text);
}

TEST_P(FabricTest, NoticesGoByTheControlConnections) {
  connect();
  std::atomic<int> heard{0};
  b().on_notice([&](int peer, std::string_view notice) { heard = peer == 0 && notice == "hear me" ? 1 : -1; });
  const int one[] = {1};
  a().tell(one, "hear me");
  const Deadline deadline = soon();
  while (heard == 0 && !deadline.passed()) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(heard, 1);
  EXPECT_EQ(a().life(1).state, Life::State::kConnected);
}

TEST_P(FabricTest, PeersOfTheSameHostAndStrangersAreNoPeers) {
  connect();
  Bytes data(8);
  EXPECT_THROW(a().send(0, 1, {}, data), InvalidArgument);
  EXPECT_THROW(a().receive(2, 1, data), InvalidArgument);
  EXPECT_THROW(a().life(5), InvalidArgument);
}

TEST_P(FabricTest, ManyThreadsShareAFabric) {
  connect();
  const auto exchange = [&](uint64_t channel) {
    for (uint64_t i = 0; i < 100; ++i) {
      const size_t bytes = i % 10 == 0 ? 150000 : 1000;
      const Bytes data = pattern(bytes, channel * 1000 + i);
      Bytes into(bytes), back(bytes);
      const auto sent = a().send(1, channel, envelope(i), data);
      await_done(b(), b().receive(0, channel, into));
      const auto returned = b().send(0, channel, envelope(i), into);
      await_done(a(), a().receive(1, channel, back));
      await_done(a(), sent);
      await_done(b(), returned);
      ASSERT_EQ(back, data);
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t channel = 0; channel < 4; ++channel) threads.emplace_back(exchange, channel);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace chorale::transport
