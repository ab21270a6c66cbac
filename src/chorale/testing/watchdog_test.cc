#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "chorale/testing/watchdog_test_util.h"

namespace chorale {
namespace {

using namespace std::chrono_literals;

// Enough for a test that ends at once, also on a machine that is busy.
constexpr auto kAmple = 2s;

[[gnu::noinline]] void hang_forever() {
  while (true) std::this_thread::sleep_for(10ms);
}

TEST(WatchdogDeathTest, PrintsTheStackOfTheHangingFunctionAndAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Watchdog watchdog(50ms);
        watchdog.start("Some.Test");
        hang_forever();
      },
      testing::KilledBySignal(SIGABRT), "Some.Test has run for 0.05 s(.|\n)*hang_forever.*watchdog_test.cc");
}

TEST(WatchdogDeathTest, LetsATestThatEndsInTimePass) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Watchdog watchdog(kAmple);
        watchdog.start("Some.Test");
        watchdog.stop();
        std::this_thread::sleep_for(kAmple + 200ms);
        _exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(WatchdogDeathTest, WatchesTheSecondTestAfterAFirstThatEnded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Watchdog watchdog(kAmple);
        watchdog.start("First.Test");
        watchdog.stop();
        watchdog.start("Second.Test");
        hang_forever();
      },
      testing::KilledBySignal(SIGABRT), "Second.Test has run");
}

}  // namespace
}  // namespace chorale
