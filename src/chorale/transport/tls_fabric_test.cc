// Messages between ranks over TLS: what arrives, where, and in which order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/transport/chaos.h"
#include "chorale/transport/fabric.h"
#include "chorale/transport/fabric_test_util.h"
#include "chorale/transport/frame.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Envelope envelope(uint64_t number) { return {{number, number + 1, 3, 4, 5, ~number}}; }

class TlsFabricTest : public testing::TestWithParam<int> {};

// Every pair, both directions, all sizes at once.
TEST_P(TlsFabricTest, MessagesOfAnySizeArriveWhole) {
  const int size = GetParam();
  auto fabrics = connect_tls_ranks(size);
  const std::array<size_t, 10> sizes{
      0, 1, 17, 4096, 16 << 10, Fabric::kEagerBytes, Fabric::kEagerBytes + 1, kChunkBytes, 1000003, 5 << 20};
  std::vector<std::thread> ranks;
  ranks.reserve(5);
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Fabric& fabric = *fabrics[static_cast<size_t>(rank)];
      std::vector<Bytes> data, into;
      std::vector<TransferHandle> sent, received;
      const auto seed = [&](int from, int to, size_t i) {
        return static_cast<uint64_t>(from * 100 + to * 10) + i * 1000;
      };
      for (int peer = 0; peer < size; ++peer) {
        for (size_t i = 0; peer != rank && i < sizes.size(); ++i) {
          data.push_back(pattern(sizes[i], seed(rank, peer, i)));
          into.emplace_back(sizes[i]);
        }
      }
      size_t next = 0;
      for (int peer = 0; peer < size; ++peer) {
        for (size_t i = 0; peer != rank && i < sizes.size(); ++i, ++next) {
          sent.push_back(fabric.send(peer, 7, envelope(i), data[next]));
          received.push_back(fabric.receive(peer, 7, into[next]));
        }
      }
      next = 0;
      for (int peer = 0; peer < size; ++peer) {
        for (size_t i = 0; peer != rank && i < sizes.size(); ++i, ++next) {
          await_done(fabric, sent[next]);
          await_done(fabric, received[next]);
          EXPECT_EQ(received[next]->source, peer);
          EXPECT_EQ(received[next]->bytes, sizes[i]);
          EXPECT_EQ(received[next]->envelope, envelope(i));
          EXPECT_EQ(into[next], pattern(sizes[i], seed(peer, rank, i))) << sizes[i] << " bytes from " << peer;
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
INSTANTIATE_TEST_SUITE_P(Ranks, TlsFabricTest, testing::Values(2, 3, 5));

class TlsPair : public testing::Test {
 protected:
  void connect(const FabricOptions& options = test_options(0)) { fabrics_ = connect_tls_ranks(2, options); }
  Fabric& a() { return *fabrics_[0]; }
  Fabric& b() { return *fabrics_[1]; }
  std::vector<std::unique_ptr<Fabric>> fabrics_;
};

TEST_F(TlsPair, MessagesOfAChannelKeepTheirOrder) {
  connect();
  constexpr int kCount = 2000;
  // Small and large ones, sent before anybody asks, and after.
  std::vector<Bytes> data;
  data.reserve(kCount);
  for (int i = 0; i < kCount; ++i) data.push_back(pattern(i % 50 == 0 ? 100000 : static_cast<size_t>(i % 7), 1));
  std::vector<TransferHandle> sent, received;
  std::vector<Bytes> into(kCount);
  for (int i = 0; i < kCount; ++i) {
    const auto at = static_cast<size_t>(i);
    into[at].resize(data[at].size());
    if (i % 3 == 0) received.push_back(b().receive(0, 5, into[at / 3]));
  }
  for (size_t i = 0; i < kCount; ++i) sent.push_back(a().send(1, 5, envelope(i), data[i]));
  for (size_t i = received.size(); i < kCount; ++i) received.push_back(b().receive(0, 5, into[i]));
  for (size_t i = 0; i < kCount; ++i) {
    await_done(a(), sent[i]);
    await_done(b(), received[i]);
    ASSERT_EQ(received[i]->envelope, envelope(i));
    if (into[i].size() == data[i].size()) {
      ASSERT_EQ(into[i], data[i]);
    }
  }
}

TEST_F(TlsPair, ChannelsAreIndependent) {
  connect();
  const Bytes large = pattern(300000, 1), small = pattern(10, 2);
  Bytes into_large(large.size()), into_small(small.size());
  const auto sent_large = a().send(1, 1, envelope(1), large);
  const auto sent_small = a().send(1, 2, envelope(2), small);
  const auto second = b().receive(0, 2, into_small);
  await_done(b(), second);
  EXPECT_EQ(into_small, small);
  EXPECT_TRUE(sent_large->pending());
  const auto first = b().receive(0, 1, into_large);
  await_done(b(), first);
  await_done(a(), sent_large);
  EXPECT_EQ(into_large, large);
}

// More than the receiver keeps: the rest waits at the sender, and other channels are not held up.
TEST_F(TlsPair, ManyMessagesThatNobodyAsksForDoNotBlockOthers) {
  connect();
  constexpr size_t kCount = 200;
  const Bytes data = pattern(Fabric::kEagerBytes, 3), small = pattern(10, 2);
  std::vector<TransferHandle> sent;
  for (size_t i = 0; i < kCount; ++i) sent.push_back(a().send(1, 1, envelope(i), data));
  EXPECT_TRUE(sent.back()->pending());
  Bytes into_small(small.size());
  a().send(1, 2, envelope(0), small);
  await_done(b(), b().receive(0, 2, into_small));
  EXPECT_EQ(into_small, small);
  for (size_t i = 0; i < kCount; ++i) {
    Bytes into(data.size());
    const auto received = b().receive(0, 1, into);
    await_done(b(), received);
    ASSERT_EQ(received->envelope, envelope(i));
    ASSERT_EQ(into, data);
    await_done(a(), sent[i]);
  }
  // The credit is back: small messages go at once again.
  EXPECT_FALSE(a().send(1, 1, envelope(0), data)->pending());
}

TEST(TlsFabric, AnySourceTakesWhoeverComesFirst) {
  auto fabrics = connect_tls_ranks(3);
  for (const size_t bytes : {size_t{8}, size_t{200000}}) {
    std::array<Bytes, 2> into{Bytes(bytes), Bytes(bytes)};
    const auto first = fabrics[0]->receive(Fabric::kAnySource, 4, into[0]);
    const auto second = fabrics[0]->receive(Fabric::kAnySource, 4, into[1]);
    const Bytes of_two = pattern(bytes, 2), of_one = pattern(bytes, 1);
    const auto sent_by_two = fabrics[2]->send(0, 4, envelope(2), of_two);
    await_done(*fabrics[0], first);
    const auto sent_by_one = fabrics[1]->send(0, 4, envelope(1), of_one);
    await_done(*fabrics[0], second);
    EXPECT_EQ(first->source, 2);
    EXPECT_EQ(into[0], of_two);
    EXPECT_EQ(second->source, 1);
    EXPECT_EQ(into[1], of_one);
    await_done(*fabrics[2], sent_by_two);
    await_done(*fabrics[1], sent_by_one);
  }
}

TEST_F(TlsPair, AMessageOfAnotherSizeIsReportedAndNotStored) {
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

TEST_F(TlsPair, ACancelledReceiveLeavesItsMemoryAndTheMessageAlone) {
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

TEST_F(TlsPair, ASendThatIsCancelledBeforeAnybodyAskedIsWithdrawn) {
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

TEST_F(TlsPair, ChecksumsAgree) {
  FabricOptions options = test_options(0);
  options.checksum = true;
  connect(options);
  for (const size_t bytes : {size_t{0}, size_t{1000}, size_t{1000003}}) {
    const Bytes data = pattern(bytes, 1);
    Bytes into(bytes);
    const auto sent = a().send(1, 1, envelope(1), data);
    await_done(b(), b().receive(0, 1, into));
    await_done(a(), sent);
    EXPECT_EQ(into, data);
  }
}

// Rank 0 has the faults; what becomes of a message to rank 1.
class TlsFaults : public TlsPair {
 protected:
  TransferHandle message_under(const char* fault, bool checksum, size_t bytes) {
    FabricOptions options = test_options(0);
    options.checksum = checksum;
    options.keep_alive = 400ms;
    const auto chaos = Chaos::of_rank(chaos_plan(fault, 2), 0);
    fabrics_ = connect_ranks(2, [&](int rank) {
      FabricOptions own = options;
      own.rank = rank;
      if (rank == 0) own.chaos = chaos;
      return make_tls_fabric(own, "127.0.0.1");
    });
    data_ = pattern(bytes, 1);
    into_.assign(bytes, {});
    chaos->enter_call();
    const auto sent = a().send(1, 1, envelope(1), data_);
    auto received = b().receive(0, 1, into_);
    await_end(a(), sent);
    await_end(b(), received);
    return received;
  }
  Bytes data_, into_;
};

TEST_F(TlsFaults, ADamagedFrameIsAlwaysFound) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    const auto received = message_under("corrupt@rank=0,call=1", false, bytes);
    EXPECT_EQ(received->state(), Transfer::State::kFailed);
    EXPECT_THAT(received->error, HasSubstr("damaged"));
  }
}

TEST_F(TlsFaults, ADamagedPayloadIsFoundWithChecksums) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    const auto received = message_under("corrupt@rank=0,call=1,what=payload", true, bytes);
    EXPECT_EQ(received->state(), Transfer::State::kFailed);
    EXPECT_THAT(received->error, HasSubstr("rank 0 sent a message whose checksum is wrong"));
    EXPECT_EQ(message_under("corrupt@rank=0,call=1,what=payload", false, bytes)->state(), Transfer::State::kDone);
    EXPECT_NE(into_, data_);
  }
}

TEST_F(TlsFaults, ShortAndLateWritesChangeNothing) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    for (const char* fault : {"short@rank=0,call=1", "stall@rank=0,call=1,ms=30"}) {
      EXPECT_EQ(message_under(fault, false, bytes)->state(), Transfer::State::kDone);
      EXPECT_EQ(into_, data_);
    }
  }
}

TEST_F(TlsFaults, AResetIsALossOnBothSides) {
  const auto received = message_under("reset@rank=0,call=1", false, 100);
  EXPECT_EQ(received->state(), Transfer::State::kFailed);
  // Whoever notices first tells the other.
  const auto either = testing::AnyOf(HasSubstr("reset on purpose"), HasSubstr("closed its connections"));
  EXPECT_THAT(await_life(b(), 0, Life::State::kLost).text, either);
  EXPECT_THAT(await_life(a(), 1, Life::State::kLost).text, either);
}

TEST_F(TlsPair, PeersOfTheSameHostAndStrangersAreNoPeers) {
  connect();
  Bytes data(8);
  EXPECT_THROW(a().send(0, 1, {}, data), InvalidArgument);
  EXPECT_THROW(a().receive(2, 1, data), InvalidArgument);
  EXPECT_THROW(a().life(5), InvalidArgument);
}

TEST_F(TlsPair, ManyThreadsShareAFabric) {
  connect();
  std::vector<std::thread> threads;
  for (uint64_t channel = 0; channel < 4; ++channel) {
    threads.emplace_back([&, channel] {
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
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace chorale::transport
