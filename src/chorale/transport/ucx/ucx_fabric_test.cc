// What is the ucx fabric's alone: what becomes of a connection of UCX's that breaks, of frames that no peer of ours
// sends, and the choice of its device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <future>
#include <thread>

#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/tls/tls_join.h"
#include "chorale/transport/ucx/ucx_fabric.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

// How many bytes were sent on this descriptor and have arrived, if it is a TCP connection.
uint64_t arrived_bytes(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info.tcpi_bytes_acked : 0;
}

// A connection of UCX breaks in the middle of a message, while those of the mesh are fine: rank 0 cannot send on it.
class UcxBreaks : public FabricPair {
 protected:
  void SetUp() override { CHORALE_SKIP_WITHOUT_FABRIC("ucx"); }
  void break_in_the_middle(std::chrono::milliseconds keep_alive) {
    FabricOptions options = test_options(0);
    options.keep_alive = keep_alive;
    fabrics_ = connect_ranks_over("ucx", 2, options);
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
TEST_F(UcxBreaks, ItIsALossWhenTheMeshKnowsNoReason) {
  constexpr auto kKeepAlive = 400ms;
  const auto before = std::chrono::steady_clock::now();
  break_in_the_middle(kKeepAlive);
  expect_one_story(await_life(a(), 1, Life::State::kLost), *sent_);
  EXPECT_GE(std::chrono::steady_clock::now() - before, kKeepAlive) << "the mesh had no time to explain it";
  expect_one_story(await_life(b(), 0, Life::State::kLost), *received_);
}

TEST_F(UcxBreaks, TheReasonThatTheMeshHearsCounts) {
  break_in_the_middle(20s);
  fabrics_[0].reset();
  const Life life = await_life(b(), 0, Life::State::kLeft, within(10s));
  EXPECT_THAT(life.text, HasSubstr("left"));
  expect_one_story(life, *received_);
}

// Nobody waits for it, so that the mesh's thread alone can have noticed.
TEST_F(UcxBreaks, StrandedTransfersCanBeCancelled) {
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

// Rank 0 is a fabric; rank 1 is a puppet that holds a bare worker and sends with it what the test says.
class UcxPuppet : public testing::Test {
 protected:
  void SetUp() override {
    CHORALE_SKIP_WITHOUT_FABRIC("ucx");
    TlsJoin join(test_options(1), "127.0.0.1");
    FabricOptions options = test_options(0);
    options.keep_alive = 400ms;
    const auto builder = make_fabric({"ucx", ""}, options, "127.0.0.1");
    worker_ = Ucx::get().make_worker("");
    std::vector<FabricAddress> addresses{builder->address(), {2, join.endpoint(), worker_->address()}};
    addresses[0].host = 1;
    auto connecting = std::async(std::launch::async, [&] { return builder->connect(addresses, soon()); });
    control_ = std::move(join.meet(addresses, 1, soon()).at(0));
    worker_->connect(0, addresses[0].data);
    send(seal(make_frame(FrameKind::kHello, 0, 0)));
    while (connecting.wait_for(0s) != std::future_status::ready) worker_->progress();
    fabric_ = connecting.get();
    take_greeting();
  }
  // UCX complains of what nobody has taken.
  void take_greeting() {
    std::optional<UcxWorker::Found> found;
    while (!(found = worker_->find(kFrameTag, kFrameTag))) worker_->progress();
    Bytes greeting(found->bytes);
    UcxWorker::Request request = worker_->receive_found(*found, greeting);
    while (worker_->test(request) == UcxWorker::Status::kPending) worker_->progress();
    EXPECT_EQ(parse_frame(std::span<const std::byte>(greeting).first<kFrameBytes>()).kind, FrameKind::kHello);
  }
  void send(const Frame& frame, std::span<const std::byte> body = {}) {
    send(std::as_bytes(std::span(&frame, 1)), body);
  }
  void send(std::span<const std::byte> head, std::span<const std::byte> body = {}) {
    UcxWorker::Request request = worker_->send(0, frame_tag(1), head, body);
    const Deadline deadline = soon();
    while (worker_->test(request) == UcxWorker::Status::kPending && !deadline.passed()) worker_->progress();
  }
  void expect_loss(const char* why) {
    const Deadline deadline = soon();
    while (!fabric_->life(1).gone() && !deadline.passed()) worker_->progress();
    EXPECT_EQ(fabric_->life(1).state, Life::State::kLost);
    EXPECT_THAT(fabric_->life(1).text, HasSubstr(why));
  }

  std::unique_ptr<UcxWorker> worker_;
  std::vector<TlsStream> control_;
  std::unique_ptr<Fabric> fabric_;
};

// The peer acts as if it were stopped: it takes part in nothing that UCX would like to agree on.
TEST_F(UcxPuppet, AFabricEndsThoughItsPeerDoesNotMove) {
  const Bytes data(1000);
  std::vector<TransferHandle> sent;
  sent.reserve(1000);
  for (int i = 0; i < 1000; ++i) sent.push_back(fabric_->send(1, 1, {}, data));
  const auto before = std::chrono::steady_clock::now();
  fabric_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - before, 5s);
}

TEST_F(UcxPuppet, AFrameOfWhichAnyBitIsWrongIsALoss) {
  Frame frame = seal(make_frame(FrameKind::kEager, 0, 3));
  frame.channel ^= 1 << 20;
  send(frame, pattern(3, 1));
  expect_loss("a frame is damaged");
}

TEST_F(UcxPuppet, AFrameThatIsCutOffIsALoss) {
  const Frame frame = seal(make_frame(FrameKind::kAnnounce, 1, 100000));
  send(std::as_bytes(std::span(&frame, 1)).first(kFrameBytes - 1));
  expect_loss("a message of 95 bytes is no frame");
}

TEST_F(UcxPuppet, AMessageThatDoesNotFitItsFrameIsALoss) {
  send(seal(make_frame(FrameKind::kEager, 0, 3)), pattern(4, 1));
  expect_loss("a message of 4 bytes does not fit its frame, which says 3");
}

TEST_F(UcxPuppet, WhatOnlyTlsSendsIsALoss) {
  send(seal(make_frame(FrameKind::kFiller, 1, 10)));
  expect_loss("which only tls sends");
}

TEST_F(UcxPuppet, MoreThanItsCreditIsALoss) {
  const Bytes body = pattern(Fabric::kEagerBytes, 1);
  for (size_t sent = 0; sent < kCreditBytes; sent += body.size())
    send(seal(make_frame(FrameKind::kEager, 0, body.size())), body);
  expect_loss("more than it has credit for");
}

TEST_F(UcxPuppet, CreditThatNobodyOwesIsALoss) {
  send(seal(make_frame(FrameKind::kCredit, 0, 1)));
  expect_loss("it gave more credit than there is");
}

// Pieces of a message that go before anybody has asked for it would be those that a receive waits for in vain when
// their sender is killed: UCX ends no such receive.
TEST(UcxWorker, WhatIsLongerThanAFrameWaitsForItsReceiver) {
  CHORALE_SKIP_WITHOUT_FABRIC("ucx");
  const auto from = Ucx::get().make_worker(""), to = Ucx::get().make_worker("");
  from->connect(1, to->address());
  const auto is_sent = [&](UcxWorker::Request& request, std::chrono::milliseconds time) {
    const Deadline deadline = within(time);
    while (from->test(request) == UcxWorker::Status::kPending) {
      if (deadline.passed()) return false;
      from->progress();
      to->progress();
    }
    return true;
  };
  for (const size_t bytes : {size_t{128} << 10, size_t{1} << 20, size_t{8} << 20}) {
    const Bytes data = pattern(bytes, bytes);
    UcxWorker::Request sending = from->send(1, bytes, {}, data);
    EXPECT_FALSE(is_sent(sending, 30ms)) << bytes;
    Bytes into(bytes);
    UcxWorker::Request receiving = to->receive(bytes, into);
    EXPECT_TRUE(is_sent(sending, 10s));
    while (to->test(receiving) == UcxWorker::Status::kPending) to->progress();
    EXPECT_EQ(into, data);
  }
}

TEST(UcxFabric, ADeviceThatIsNotThereIsNamed) {
  CHORALE_SKIP_WITHOUT_FABRIC("ucx");
  try {
    make_fabric({"ucx", "nosuch0"}, test_options(0), "127.0.0.1");
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("nosuch0"));
  }
}

}  // namespace
}  // namespace chorale::transport
