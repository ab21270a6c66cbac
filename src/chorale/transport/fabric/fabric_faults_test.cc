// Checksums, and faults on purpose, over each fabric.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/transport/fabric/chaos.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/fabric/fabric_test_util.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

class FabricFaults : public FabricPair, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { CHORALE_SKIP_WITHOUT_FABRIC(GetParam()); }
  // Rank 0 has the faults; what becomes of a message to rank 1.
  TransferHandle message_under(const char* fault, bool checksum, size_t bytes) {
    const auto chaos = Chaos::of_rank(chaos_plan(fault, 2), 0);
    fabrics_ = connect_ranks(2, [&](int rank) {
      FabricOptions options = test_options(rank);
      options.checksum = checksum;
      options.keep_alive = 400ms;
      if (rank == 0) options.chaos = chaos;
      return make_fabric({GetParam(), ""}, options, "127.0.0.1");
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
INSTANTIATE_TEST_SUITE_P(Fabrics, FabricFaults, testing::ValuesIn(kFabricNames),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(FabricFaults, ChecksumsAgree) {
  FabricOptions options = test_options(0);
  options.checksum = true;
  fabrics_ = connect_ranks_over(GetParam(), 2, options);
  for (const size_t bytes : {size_t{0}, size_t{1000}, size_t{1000003}}) {
    const Bytes data = pattern(bytes, 1);
    Bytes into(bytes);
    const auto sent = a().send(1, 1, envelope(1), data);
    await_done(b(), b().receive(0, 1, into));
    await_done(a(), sent);
    EXPECT_EQ(into, data);
  }
}

TEST_P(FabricFaults, ADamagedFrameIsAlwaysFound) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    const auto received = message_under("corrupt@rank=0,call=1", false, bytes);
    EXPECT_EQ(received->state(), Transfer::State::kFailed);
    EXPECT_THAT(received->error, HasSubstr("damaged"));
  }
}

TEST_P(FabricFaults, ADamagedPayloadIsFoundWithChecksums) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    const auto received = message_under("corrupt@rank=0,call=1,what=payload", true, bytes);
    EXPECT_EQ(received->state(), Transfer::State::kFailed);
    EXPECT_THAT(received->error, HasSubstr("rank 0 sent a message whose checksum is wrong"));
    EXPECT_EQ(message_under("corrupt@rank=0,call=1,what=payload", false, bytes)->state(), Transfer::State::kDone);
    EXPECT_NE(into_, data_);
  }
}

TEST_P(FabricFaults, ShortAndLateWritesChangeNothing) {
  for (const size_t bytes : {size_t{100}, size_t{300000}}) {
    for (const char* fault : {"short@rank=0,call=1", "stall@rank=0,call=1,ms=30"}) {
      EXPECT_EQ(message_under(fault, false, bytes)->state(), Transfer::State::kDone);
      EXPECT_EQ(into_, data_);
    }
  }
}

TEST_P(FabricFaults, AResetIsALossOnBothSides) {
  const auto received = message_under("reset@rank=0,call=1", false, 100);
  EXPECT_EQ(received->state(), Transfer::State::kFailed);
  // The rank that notices first tells the other.
  const auto either = testing::AnyOf(HasSubstr("reset on purpose"), HasSubstr("closed its connections"));
  EXPECT_THAT(await_life(b(), 0, Life::State::kLost).text, either);
  EXPECT_THAT(await_life(a(), 1, Life::State::kLost).text, either);
}

}  // namespace
}  // namespace chorale::transport
