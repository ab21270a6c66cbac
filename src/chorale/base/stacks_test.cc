#include "chorale/base/stacks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <latch>
#include <semaphore>
#include <thread>

namespace chorale {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

[[gnu::noinline]] void wait_in_a_function_with_a_name(std::latch& entered, std::binary_semaphore& leave) {
  entered.count_down();
  leave.acquire();
}

TEST(Stacks, ShowTheFunctionAndLineOfEveryThread) {
  std::latch entered(2);
  std::binary_semaphore leave_a(0);
  std::binary_semaphore leave_b(0);
  std::thread a([&] { wait_in_a_function_with_a_name(entered, leave_a); });
  std::thread b([&] { wait_in_a_function_with_a_name(entered, leave_b); });
  entered.wait();
  const std::string text = stacks_of_all_threads();
  leave_a.release();
  leave_b.release();
  a.join();
  b.join();
  // The two threads that wait, and this one.
  EXPECT_THAT(text, ContainsRegex("wait_in_a_function_with_a_name.*stacks_test.cc:[0-9]+(.|\n)*"
                                  "wait_in_a_function_with_a_name.*stacks_test.cc:[0-9]+"));
  EXPECT_THAT(text, HasSubstr("ShowTheFunctionAndLineOfEveryThread"));
}

TEST(Stacks, ReportAThreadThatBlocksSignalsAsNotAnswering) {
  std::latch entered(1);
  std::binary_semaphore leave(0);
  std::thread blocked([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "deaf");
    wait_in_a_function_with_a_name(entered, leave);
  });
  entered.wait();
  const std::string text = stacks_of_all_threads();
  leave.release();
  blocked.join();
  EXPECT_THAT(text, HasSubstr("(deaf) did not answer"));
}

}  // namespace
}  // namespace chorale
