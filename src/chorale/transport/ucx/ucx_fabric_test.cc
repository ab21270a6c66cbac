// Messages between ranks over UCX: what arrives, where, and in which order. Ranks are threads, over TCP of this host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/base/module.h"
#include "chorale/transport/fabric.h"
#include "chorale/transport/fabric_name.h"
#include "chorale/transport/fabric_test_util.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Envelope envelope(uint64_t number) { return {{number, number + 1, 3, 4, 5, ~number}}; }

class UcxFabricTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const Availability found = module_availability(kUcxModule);
    if (!found.yes) GTEST_SKIP() << found.reason;
  }
  void connect(int size = 2, std::chrono::milliseconds keep_alive = 2s) {
    fabrics_ = connect_ranks(size, [&](int rank) {
      FabricOptions options = test_options(rank);
      options.keep_alive = keep_alive;
      return make_fabric({"ucx", ""}, options, "127.0.0.1");
    });
  }
  Fabric& a() { return *fabrics_[0]; }
  Fabric& b() { return *fabrics_[1]; }
  std::vector<std::unique_ptr<Fabric>> fabrics_;
};
using UcxRanks = UcxFabricTest;

// Every pair, both directions, all sizes at once.
TEST_P(UcxRanks, MessagesOfAnySizeArriveWhole) {
  const int size = GetParam();
  connect(size);
  const std::array<size_t, 8> sizes{0, 1, 17, 4096, Fabric::kEagerBytes, Fabric::kEagerBytes + 1, 1000003, 5 << 20};
  std::vector<std::thread> ranks;
  ranks.reserve(5);
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Fabric& fabric = *fabrics_[static_cast<size_t>(rank)];
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
INSTANTIATE_TEST_SUITE_P(Ranks, UcxRanks, testing::Values(2, 3));

class UcxPair : public UcxFabricTest {};
INSTANTIATE_TEST_SUITE_P(One, UcxPair, testing::Values(2));

TEST_P(UcxPair, MessagesOfAChannelKeepTheirOrder) {
  connect();
  EXPECT_STREQ(a().name(), "ucx");
  constexpr size_t kCount = 500;
  // Small and large ones, sent before anybody asks.
  std::vector<Bytes> data, into(kCount);
  std::vector<TransferHandle> sent, received;
  for (size_t i = 0; i < kCount; ++i) data.push_back(pattern(i % 50 == 0 ? 100000 : i % 7, 1));
  for (size_t i = 0; i < kCount; ++i) sent.push_back(a().send(1, 5, envelope(i), data[i]));
  for (size_t i = 0; i < kCount; ++i) {
    into[i].resize(data[i].size());
    received.push_back(b().receive(0, 5, into[i]));
  }
  for (size_t i = 0; i < kCount; ++i) {
    await_done(b(), received[i]);
    await_done(a(), sent[i]);
    ASSERT_EQ(received[i]->envelope, envelope(i));
    ASSERT_EQ(into[i], data[i]);
  }
}

// More than the receiver keeps: the rest waits at the sender, and other channels are not held up.
TEST_P(UcxPair, ManyMessagesThatNobodyAsksForDoNotBlockOthers) {
  connect();
  constexpr size_t kCount = 100;
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
}

TEST_P(UcxPair, AnySourceTakesWhoeverComesFirst) {
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

TEST_P(UcxPair, AMessageOfAnotherSizeIsReportedAndNotStored) {
  connect();
  for (const size_t bytes : {size_t{8}, size_t{0}, size_t{200000}}) {
    const Bytes data = pattern(bytes, 1), before = pattern(100, 9);
    Bytes into = before;
    const auto received = b().receive(0, 1, into);
    const auto sent = a().send(1, 1, envelope(1), data);
    await_done(b(), received);
    await_done(a(), sent);
    EXPECT_EQ(received->bytes, bytes);
    EXPECT_EQ(into, before);
  }
}

TEST_P(UcxPair, ACancelledReceiveLeavesItsMemoryAndTheMessageAlone) {
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

TEST_P(UcxPair, ASendThatIsCancelledBeforeAnybodyAskedIsWithdrawn) {
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

TEST_P(UcxPair, AReceiveThatIsCancelledHalfwayStoresNothingMore) {
  connect();
  const Bytes data = pattern(64 << 20, 1);
  Bytes into(data.size());
  const auto received = b().receive(0, 1, into);
  const auto sent = a().send(1, 1, envelope(1), data);
  const Deadline deadline = soon();
  volatile const std::byte* first = into.data();
  while (*first == std::byte{0} && !deadline.passed()) std::this_thread::yield();
  if (!b().cancel(received)) return;  // it came whole in the meantime, which is as well
  const Bytes at_cancel = into;
  await_end(a(), sent);
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(into == at_cancel);
}

TEST_P(UcxPair, APeerThatLeavesIsNoticedAfterItsLastMessage) {
  connect(2, 400ms);
  const Bytes data = pattern(1000, 1);
  Bytes into(data.size()), never(10);
  a().send(1, 1, envelope(1), data);
  const auto hopeless = b().receive(0, 2, never);
  fabrics_[0].reset();
  const auto received = b().receive(0, 1, into);
  await_done(b(), received);
  EXPECT_EQ(into, data);
  await_end(b(), hopeless);
  EXPECT_EQ(hopeless->state(), Transfer::State::kFailed);
  EXPECT_EQ(b().life(0).state, Life::State::kLeft) << b().life(0).text;
}

// How many bytes were sent on this descriptor and have arrived, if it is a TCP connection.
uint64_t arrived_bytes(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info.tcpi_bytes_acked : 0;
}

// A connection of UCX breaks in the middle of a message, while those of the mesh are fine: rank 0 cannot send on it.
class UcxBreaks : public UcxFabricTest {
 protected:
  void break_in_the_middle(std::chrono::milliseconds keep_alive) {
    connect(2, keep_alive);
    data_[0] = std::byte{1};
    received_ = b().receive(0, 1, into_);
    sent_ = a().send(1, 1, envelope(1), data_);
    volatile const std::byte* first = into_.data();
    const Deadline deadline = soon();
    while (*first == std::byte{0} && !deadline.passed()) std::this_thread::yield();
    int bulk = 0;
    for (int descriptor = 0; descriptor < 1024; ++descriptor) {
      if (arrived_bytes(descriptor) > arrived_bytes(bulk)) bulk = descriptor;
    }
    ASSERT_EQ(shutdown(bulk, SHUT_WR), 0);
    ASSERT_TRUE(sent_->pending() && received_->pending()) << "it was too fast";
  }
  static void expect_one_story(const Life& life, const Transfer& transfer) {
    EXPECT_EQ(transfer.state(), Transfer::State::kFailed);
    EXPECT_EQ(transfer.error, life.text);
  }
  // It takes a tenth of a second or more.
  Bytes data_ = Bytes(256 << 20), into_ = Bytes(data_.size());
  TransferHandle sent_, received_;
};
INSTANTIATE_TEST_SUITE_P(One, UcxBreaks, testing::Values(2));

TEST_P(UcxBreaks, ItIsALossWhenTheMeshKnowsNoReason) {
  constexpr auto kKeepAlive = 400ms;
  const auto before = std::chrono::steady_clock::now();
  break_in_the_middle(kKeepAlive);
  expect_one_story(await_life(a(), 1, Life::State::kLost), *sent_);
  EXPECT_GE(std::chrono::steady_clock::now() - before, kKeepAlive) << "the mesh had no time to explain it";
  expect_one_story(await_life(b(), 0, Life::State::kLost), *received_);
}

TEST_P(UcxBreaks, TheReasonThatTheMeshHearsCounts) {
  break_in_the_middle(20s);
  fabrics_[0].reset();
  const Life life = await_life(b(), 0, Life::State::kLeft, within(10s));
  EXPECT_THAT(life.text, HasSubstr("left"));
  expect_one_story(life, *received_);
}

// Nobody waits for it, so that the mesh's thread alone can have noticed.
TEST_P(UcxBreaks, StrandedTransfersCanBeCancelled) {
  break_in_the_middle(20s);
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(sent_->pending() && received_->pending());
  EXPECT_TRUE(a().cancel(sent_));
  EXPECT_TRUE(b().cancel(received_));
  EXPECT_EQ(sent_->error, "cancelled");
  EXPECT_EQ(received_->error, "cancelled");
  EXPECT_FALSE(a().cancel(sent_));
  EXPECT_EQ(a().life(1).state, Life::State::kConnected);
}

TEST_P(UcxPair, NoticesAndLivesGoByTheControlConnections) {
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

TEST_P(UcxPair, ADeviceThatIsNotThereIsNamed) {
  try {
    make_fabric({"ucx", "nosuch0"}, test_options(0), "127.0.0.1");
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("nosuch0"));
  }
}

}  // namespace
}  // namespace chorale::transport
