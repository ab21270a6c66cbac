// What is the ucx fabric's alone: what becomes of a connection of UCX's that breaks, and the choice of its device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "chorale/transport/fabric_name.h"
#include "chorale/transport/fabric_test_util.h"

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
