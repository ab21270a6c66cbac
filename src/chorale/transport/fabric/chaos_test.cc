#include "chorale/transport/fabric/chaos.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>

#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = ChaosFault::Kind;
using What = ChaosFault::What;

std::shared_ptr<Chaos> chaos(std::string_view plan, int rank = 0) { return Chaos::of_rank(chaos_plan(plan, 4), rank); }

int bits_set(std::span<const std::byte> bytes) {
  int bits = 0;
  for (std::byte byte : bytes) bits += std::popcount(static_cast<uint8_t>(byte));
  return bits;
}

TEST(ChaosPlan, SaysRankCallAndFault) {
  const ChaosPlan plan =
      chaos_plan("kill@rank=1,call=7;delay@rank=0,call=3,ms=20;corrupt@call=2,rank=3,what=payload", 4);
  const ChaosPlan expected{{.kind = Kind::kKill, .rank = 1, .call = 7},
                           {.kind = Kind::kDelay, .rank = 0, .call = 3, .time = 20ms},
                           {.kind = Kind::kCorrupt, .rank = 3, .call = 2, .what = What::kPayload}};
  EXPECT_EQ(plan, expected);
  EXPECT_EQ(chaos_plan(text_of(plan), 4), plan);
}

TEST(ChaosPlan, WhatIsNoPlanIsRefusedWithAnExample) {
  for (const char* text : {"explode@rank=0,call=1", "kill", "kill@rank=0", "kill@rank=4,call=1", "kill@rank=0,call=0",
                           "kill@rank=0,call=1,ms=5", "delay@rank=0,call=1,ms=x", "corrupt@rank=0,call=1,what=all",
                           "-3", "kill@rank=0,call=1;;"}) {
    try {
      chaos_plan(text, 4);
      ADD_FAILURE() << text << " was taken for a plan";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("such as kill@rank=1,call=7")) << text;
    }
  }
}

TEST(ChaosPlan, ASeedAlwaysMakesTheSamePlan) {
  EXPECT_EQ(text_of(chaos_plan("42", 3)), text_of(chaos_plan("42", 3)));
  EXPECT_NE(text_of(chaos_plan("42", 3)), text_of(chaos_plan("43", 3)));
  // Recorded, so that a seed that somebody reports means the same in later versions.
  EXPECT_EQ(text_of(chaos_plan("1", 2)),
            "delay@rank=0,call=5,ms=10;short@rank=1,call=5;short@rank=1,call=308;short@rank=1,call=111");
}

TEST(ChaosPlan, SeedsReachEveryFaultAndEveryRank) {
  std::array<int, 7> kinds{};
  std::array<int, 3> ranks{};
  for (int seed = 0; seed < 200; ++seed) {
    const ChaosPlan plan = chaos_plan(std::to_string(seed), 3);
    EXPECT_EQ(chaos_plan(text_of(plan), 3), plan);
    for (const ChaosFault& fault : plan) {
      ++kinds[static_cast<size_t>(fault.kind)];
      ++ranks[static_cast<size_t>(fault.rank)];
    }
  }
  EXPECT_THAT(kinds, testing::Each(testing::Gt(5)));
  EXPECT_THAT(ranks, testing::Each(testing::Gt(100)));
}

TEST(Chaos, ARankWithoutFaultsHasNone) {
  EXPECT_EQ(chaos("kill@rank=1,call=7"), nullptr);
  EXPECT_NE(chaos("kill@rank=1,call=7", 1), nullptr);
}

// A call without a delay takes no time; on a busy machine it may be put off, but hardly for so long.
constexpr auto kUndisturbed = 900ms;

TEST(Chaos, DelaysTheCallThatItNames) {
  const auto faults = chaos("delay@rank=0,call=2,ms=1000");
  const auto time_of_call = [&] {
    const auto start = Clock::now();
    faults->enter_call();
    return Clock::now() - start;
  };
  EXPECT_LT(time_of_call(), kUndisturbed);
  EXPECT_GE(time_of_call(), 1000ms);
  EXPECT_LT(time_of_call(), kUndisturbed);
}

TEST(Chaos, StallsInTheMiddleOfTheCallOnce) {
  const auto faults = chaos("stall@rank=0,call=1,ms=1000");
  const auto time_of = [&](const auto& step) {
    const auto start = Clock::now();
    step();
    return Clock::now() - start;
  };
  EXPECT_LT(time_of([&] { faults->pause(); }), kUndisturbed);
  EXPECT_LT(time_of([&] { faults->enter_call(); }), kUndisturbed);
  EXPECT_GE(time_of([&] { faults->pause(); }), 1000ms);
  EXPECT_LT(time_of([&] { faults->pause(); }), kUndisturbed);
}

TEST(Chaos, FlipsOneBitOfWhatItNames) {
  const auto faults = chaos("corrupt@rank=0,call=1,what=payload");
  std::array<std::byte, 40> control{}, payload{};
  faults->touch(What::kPayload, payload);
  EXPECT_EQ(bits_set(payload), 0) << "the call was not entered yet";
  faults->enter_call();
  faults->touch(What::kControl, control);
  faults->touch(What::kPayload, payload);
  EXPECT_EQ(bits_set(control), 0);
  EXPECT_EQ(bits_set(payload), 1);
  faults->touch(What::kPayload, payload);
  EXPECT_EQ(bits_set(payload), 1) << "once only";
}

TEST(Chaos, WritesAreCutShortResetAndDamagedInTheirCall) {
  const auto faults = chaos("short@rank=0,call=1;reset@rank=0,call=2;corrupt@rank=0,call=3,what=payload");
  Chaos::Write write = faults->before_write(1000, true);
  EXPECT_EQ(write.most, 1000u);
  EXPECT_FALSE(write.reset || write.corrupt_control || write.corrupt_payload);
  faults->enter_call();
  int cut = 0;
  for (int i = 0; i < 100; ++i) {
    write = faults->before_write(1000, true);
    EXPECT_GE(write.most, 1u);
    cut += write.most < 1000 ? 1 : 0;
  }
  EXPECT_EQ(cut, 16);
  faults->enter_call();
  EXPECT_TRUE(faults->before_write(10, false).reset);
  EXPECT_FALSE(faults->before_write(10, false).reset);
  faults->enter_call();
  EXPECT_FALSE(faults->before_write(10, false).corrupt_payload) << "there is none";
  EXPECT_TRUE(faults->before_write(10, true).corrupt_payload);
}

TEST(ChaosDeathTest, KillsItsOwnProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(chaos("kill@rank=0,call=1")->enter_call(), testing::KilledBySignal(SIGKILL), "");
}

}  // namespace
}  // namespace chorale::transport
