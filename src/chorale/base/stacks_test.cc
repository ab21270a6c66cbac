#include "chorale/base/stacks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

namespace chorale {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

// Threads that wait in a function with a name. They wait on a condition variable, where ThreadSanitizer delivers
// signals.
class Gate {
 public:
  [[gnu::noinline]] void wait_in_a_function_with_a_name() {
    std::unique_lock lock(mutex_);
    ++inside_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void wait_for(int threads) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return inside_ == threads; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  bool open_ = false;
};

TEST(Stacks, ShowTheFunctionAndLineOfEveryThread) {
  Gate gate;
  std::thread a([&] { gate.wait_in_a_function_with_a_name(); });
  std::thread b([&] { gate.wait_in_a_function_with_a_name(); });
  gate.wait_for(2);
  const std::string text = stacks_of_all_threads();
  gate.open();
  a.join();
  b.join();
  // The two threads that wait, and this one.
  EXPECT_THAT(text, ContainsRegex("wait_in_a_function_with_a_name.*stacks_test.cc:[0-9]+(.|\n)*"
                                  "wait_in_a_function_with_a_name.*stacks_test.cc:[0-9]+"));
  EXPECT_THAT(text, HasSubstr("ShowTheFunctionAndLineOfEveryThread"));
}

TEST(Stacks, ReportAThreadThatBlocksSignalsAsNotAnswering) {
  Gate gate;
  std::thread blocked([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "deaf");
    gate.wait_in_a_function_with_a_name();
  });
  gate.wait_for(1);
  const std::string text = stacks_of_all_threads();
  gate.open();
  blocked.join();
  EXPECT_THAT(text, HasSubstr("(deaf) did not answer"));
}

}  // namespace
}  // namespace chorale
