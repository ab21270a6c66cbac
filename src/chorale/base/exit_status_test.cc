#include "chorale/base/exit_status.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

namespace chorale {
namespace {

using testing::ExitedWithCode;

// Runs in a process of its own, which ends with `status`; handlers set before and after are called once.
void end_after_a_failure(int status) {
  std::atexit([] { std::cerr << "first "; });
  end_with_failure();
  end_with_failure();
  std::atexit([] { std::cerr << "second "; });
  std::exit(status);
}

TEST(ExitStatusDeathTest, AFailureIsSeenFromOutside) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // an exit in a fork would wait for the watchdog's thread
  EXPECT_EXIT(end_after_a_failure(0), ExitedWithCode(1), "^second first $");
  EXPECT_EXIT(end_after_a_failure(3), ExitedWithCode(3), "^second first $");
}

}  // namespace
}  // namespace chorale
