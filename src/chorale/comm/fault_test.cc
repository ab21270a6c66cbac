// Never a hang, never a wrong sum: what tests/fault_matrix, which has every fault in every call, does not show.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <iostream>
#include <latch>
#include <mutex>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/leaving.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/shm/shm_engine.h"
#include "chorale/comm/world.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/environment_test_util.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::HasSubstr;

const std::atomic<uint32_t>* watched_hands = nullptr;
void stop_with_hands_up(int) {
  if (watched_hands->load() == 0) return;
  const itimerval never{};
  setitimer(ITIMER_VIRTUAL, &never, nullptr);
  kill(getpid(), SIGSTOP);
}

void reduce_until_it_fails(Group& group, const Tensor& x) {
  for (int i = 0; i < 200; ++i) group.all_reduce(x).wait();
}

// A peer is stopped while it stores into our tensor, and wakes long after we have given up on it.
TEST(Faults, AStoppedPeerThatWakesDoesNotWriteIntoWhatASurvivorHasTakenBack) {
  constexpr int64_t kElems = int64_t{16} << 20;
  const auto body = [&](Group& group) {
    int64_t pids[2] = {};
    const int64_t own = getpid();
    group.all_gather_into(std::span<int64_t>(pids), std::span<const int64_t>(&own, 1)).wait();
    const Tensor x = Tensor::empty({kElems}, DType::kF32);
    std::fill_n(x.data<float>(), kElems, 1.0f);
    group.all_reduce(x).wait();
    ASSERT_EQ(x.data<float>()[kElems - 1], 2.0f);
    group.barrier().wait();
    if (group.rank() == 1) {
      // The signal comes by a clock that counts the time this process computes, so that it happens however busy the
      // machine is.
      watched_hands = &static_cast<const ShmEngine&>(*group.engine()).group().own().hands;
      signal(SIGVTALRM, stop_with_hands_up);
      const itimerval every_ms{{0, 1000}, {0, 1000}};
      setitimer(ITIMER_VIRTUAL, &every_ms, nullptr);
      EXPECT_THROW(reduce_until_it_fails(group, x), CommError);
      return;
    }
    try {
      reduce_until_it_fails(group, x);
      FAIL() << "the peer was not stopped in the middle";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1);
      EXPECT_THAT(error.what(), HasSubstr("stopped by a signal"));
    }
    std::fill_n(x.data<float>(), kElems, -7.0f);
    const auto peer = shm::PeerProcess::find(static_cast<const ShmEngine&>(*group.engine()).group().process_of(1));
    kill(static_cast<pid_t>(pids[1]), SIGCONT);
    while (peer->alive()) std::this_thread::sleep_for(1ms);
    for (int64_t i = 0; i < kElems; ++i) ASSERT_EQ(x.data<float>()[i], -7.0f) << i;
  };
  EXPECT_EQ(run_processes(2, body, {.timeout = 2s}), (std::vector<int>{0, 0}));
}

// Long before the limit of the call, which is two minutes.
void expect_a_stopped_rank_is_given_up(Group& outer) {
  transport::ScratchEnvironment environment;
  environment.set("CHORALE_STOP_PATIENCE", "1");
  Group group = outer.duplicate({.timeout = 120s});
  std::vector<int64_t> pids(static_cast<size_t>(group.size()));
  const int64_t own = getpid();
  group.all_gather_into(std::span(pids), std::span<const int64_t>(&own, 1)).wait();
  if (group.rank() == 1) raise(SIGSTOP);
  const auto start = Clock::now();
  try {
    group.barrier().wait();
    if (group.rank() != 1) FAIL() << "the rank was not stopped";
  } catch (const CommError& error) {
    if (group.rank() == 1) return;
    EXPECT_EQ(error.failure().peer, 1) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("it is stopped since")) << error.what();
    EXPECT_LT(Clock::now() - start, 60s);
  }
  if (group.rank() == 0) kill(static_cast<pid_t>(pids[1]), SIGCONT);
}

TEST(Faults, ARankThatIsStoppedIsGivenUpAfterAPatience) {
  EXPECT_EQ(run_processes(3, expect_a_stopped_rank_is_given_up), (std::vector<int>{0, 0, 0}));
}

TEST(Faults, SurvivorsBuildANewGroup) {
  const auto body = [&](Group& group) {
    if (group.rank() == 1) raise(SIGKILL);
    EXPECT_THROW(group.barrier().wait(), CommError);
    transport::FileStore store(*config::env("CHORALE_TEST_STORE"));
    Group after = Group::connect(store, "after", group.rank() / 2, 2, {.timeout = 5s});
    std::vector<float> x(100'000, 1);
    after.all_reduce(std::span(x)).wait();
    EXPECT_EQ(x, std::vector<float>(100'000, 2));
  };
  EXPECT_EQ(run_processes(3, body, {.timeout = 5s}), (std::vector<int>{0, -SIGKILL, 0}));
}

TEST(Faults, ALateRankIsWaitedForUntilTheDeadline) {
  run_ranks(2, [&](Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(300ms);
    group.barrier({.tag = 0, .timeout = 30s}).wait();  // slow, but in time
    if (group.rank() == 1) return;
    const auto start = Clock::now();
    const Work work = group.barrier({.tag = 0, .timeout = 30s});
    EXPECT_THROW(work.wait(), CommError);
    // Rank 1 left, which is an error at once; nobody need wait for the deadline.
    EXPECT_LT(Clock::now() - start, 15s);
  });
}

TEST(Faults, ARankThatOnlyPollsLearnsOfALateRankAndOfOneThatLeft) {
  std::latch told(1);
  run_ranks(2, [&](Group& group) {
    Group other = group.duplicate();
    if (group.rank() == 1) return told.wait();  // stays away, and then leaves the other group
    const auto poll = [](const Work& work) -> std::string {
      while (!work.is_completed()) std::this_thread::sleep_for(1ms);
      try {
        work.wait();
      } catch (const CommError& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_THAT(poll(group.barrier({.tag = 0, .timeout = 100ms})), HasSubstr("nothing from rank 1"));
    told.count_down();
    EXPECT_THAT(poll(other.barrier()), HasSubstr("rank 1"));
  });
}

// What is written to std::cerr meanwhile.
class Errors final : public std::streambuf {
 public:
  Errors() : before_(std::cerr.rdbuf(this)) {}
  ~Errors() override { std::cerr.rdbuf(before_); }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  // Looks until `part` is there so many times; false after half a minute.
  bool wait_for(const std::string& part, size_t times) const {
    for (const auto end = Clock::now() + 30s; Clock::now() < end; std::this_thread::sleep_for(5ms)) {
      const std::string seen = text();
      size_t found = 0;
      for (size_t at = seen.find(part); at != std::string::npos; at = seen.find(part, at + 1)) ++found;
      if (found >= times) return true;
    }
    return false;
  }

 protected:
  std::streamsize xsputn(const char* data, std::streamsize count) override {
    const std::lock_guard lock(mutex_);
    text_.append(data, static_cast<size_t>(count));
    return count;
  }
  int_type overflow(int_type c) override {
    const std::lock_guard lock(mutex_);
    text_ += traits_type::to_char_type(c);
    return c;
  }

 private:
  std::streambuf* before_;
  mutable std::mutex mutex_;
  std::string text_;
};

// One host and two hosts are tested at the same time, because each takes more than five seconds.
TEST(Faults, ARankThatWaitsForLongNamesTheLateOneAndWhatItDoes) {
  const Errors errors;
  const auto body = [&](bool message) {
    return [&, message](Group& group) {
      const Tensor x = Tensor::from(std::vector<float>{1, 2, 3}, {3});
      group.all_reduce(x).wait();
      // Rank 1 comes when all four that wait have said so.
      if (group.rank() == 1) {
        EXPECT_TRUE(errors.wait_for("waiting since ", 4));
      }
      if (!message) group.barrier().wait();
      if (message && group.rank() == 0) group.recv(x, 1);
      if (message && group.rank() == 1) group.send(x, 0);
    };
  };
  {
    std::vector<std::jthread> jobs;
    for (bool message : {false, true}) {
      jobs.emplace_back([&, message] { run_hosts({0, 1}, body(message), {.timeout = 40s}); });
      jobs.emplace_back([&, message] { run_ranks(2, body(message), {.timeout = 40s}); });
    }
  }
  const std::string text = errors.text();
  for (const std::string call : {"barrier #2", "recv"}) {
    const std::string start = concat("[", call, "] rank 0 (group world of 2): waiting since ");
    size_t lines = 0;
    for (size_t at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
      const std::string line = text.substr(at, text.find('\n', at) - at);
      const double seconds = std::stod(line.substr(start.size()));
      EXPECT_GE(seconds, 5) << line;
      if (seconds >= 10) continue;  // said again
      EXPECT_THAT(line, HasSubstr(" s for rank 1 ("));
      EXPECT_THAT(line, HasSubstr("last entered all_reduce of 3 f32 (sum)"));
      ++lines;
    }
    EXPECT_EQ(lines, 2u) << text;  // on one host, and between two
  }
}

// A process that nothing unwinds: std::terminate, _exit.
TEST(Faults, WhatARankHasThrownIsSaidWhenItsProcessHasEnded) {
  const auto body = [](Group& group) {
    group.barrier().wait();
    if (group.rank() == 1) {
      group.note_exception("out of memory");
      _exit(3);
    }
    try {
      group.barrier().wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1);
      EXPECT_THAT(error.what(), HasSubstr("it last entered barrier #1, and then threw: out of memory"));
    }
  };
  EXPECT_EQ(run_processes(2, body), (std::vector<int>{0, 3}));
}

// A save in the background that uses the group of training. Rank 0 makes all its calls from one thread.
TEST(Faults, DifferentCallsOfSeveralThreadsAreSaidToNeedGroupsOfTheirOwn) {
  run_everywhere(2, [](Group& group) {
    const Tensor x = Tensor::empty({3}, DType::kF32);
    const auto in_background = [&](const std::function<void()>& call) {
      if (group.rank() == 0) return call();
      std::thread(call).join();
    };
    group.barrier().wait();
    in_background([&] { group.broadcast(x, 0).wait(); });
    const std::string message =
        message_of<CommError>([&] { group.rank() == 0 ? group.barrier().wait() : group.broadcast(x, 0).wait(); });
    EXPECT_THAT(message, HasSubstr("different calls"));
    EXPECT_THAT(message, testing::Not(HasSubstr("rank 0 makes the calls")));
    if (group.rank() == 0) return;
    EXPECT_THAT(message, testing::ContainsRegex("rank 1 makes the calls of this group from several threads: thread "
                                                "[0-9]+ .*last entered .*#.*, thread [0-9]+ .*last entered .*#"));
    EXPECT_THAT(message, HasSubstr("async_save"));
  });
  run_everywhere(2, [](Group& group) {
    group.barrier().wait();
    const Tensor x = Tensor::empty({3}, DType::kF32);
    const std::string message =
        message_of<CommError>([&] { group.rank() == 0 ? group.barrier().wait() : group.broadcast(x, 0).wait(); });
    EXPECT_THAT(message, testing::AllOf(HasSubstr("different calls"), testing::Not(HasSubstr("thread"))));
  });
}

TEST(Faults, WhatARankHasThrownIsForgottenWithItsNextCall) {
  run_threads_and_processes(2, [](Group& group) {
    group.note_exception("out of memory");
    group.barrier().wait();
    if (group.rank() == 1) return;
    try {
      group.barrier().wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("has left the group"));
      EXPECT_THAT(error.what(), testing::Not(HasSubstr("threw")));
    }
  });
}

// ---- a rank that leaves a call out (Note [Leaving together] in comm/leaving.h)

TEST(Leaving, ARankThatLeftACallOutLearnsItAtItsEnd) {
  run_everywhere(3, [](Group& group) {
    std::vector<float> x(7, 1);
    group.all_reduce(std::span(x)).wait();
    if (group.rank() == 1) {
      const std::string text = message_blaming(1, [&] { leave(group, 60s); });
      EXPECT_THAT(text, HasSubstr("rank 1 (group world of 3) leaves the group, but rank "));
      EXPECT_THAT(text, HasSubstr(" last entered all_reduce of 7 f32 (sum) #2, a call that this rank did not make"));
      EXPECT_THAT(text, HasSubstr("the last calls are in "));
      EXPECT_FALSE(group.is_member());
      return;
    }
    message_blaming(1, [&] { group.all_reduce(std::span(x)).wait(); });
  });
}

TEST(Leaving, RanksThatMadeTheSameCallsLeaveTogether) {
  std::atomic<int> leaving{0};
  run_everywhere(3, [&](Group& group) {
    std::vector<float> x(7, 1);
    const Work work = group.all_reduce(std::span(x));  // still to be done
    ++leaving;
    EXPECT_TRUE(leave(group, 60s));
    EXPECT_TRUE(work.is_completed());
    EXPECT_EQ(x[6], 3);
    EXPECT_FALSE(group.is_member());
    EXPECT_TRUE(is_rank_process() || leaving % 3 == 0) << "a rank did not wait for the others";
  });
}

TEST(Leaving, OthersThatStayAreWaitedForForAWhile) {
  run_everywhere(2, [](Group& group) {
    Group stays = group.duplicate();
    if (group.rank() == 0) {
      EXPECT_FALSE(leave(stays, 20ms));
    }
    group.barrier().wait();
  });
}

TEST(Leaving, ARankThatThrowsIsAnErrorForThoseThatWait) {
  run_everywhere(2, [](Group& group) {
    Group trial = group.duplicate();
    trial.barrier().wait();
    if (group.rank() == 0) {
      EXPECT_THAT(message_blaming(1, [&] { leave(trial, 60s); }), HasSubstr("left the group because of an exception"));
    } else {
      try {
        const Group thrown = std::move(trial);
        throw StateError("on purpose");
      } catch (const StateError&) {
      }
    }
    group.barrier().wait();
  });
}

// A program that ends without a word (a script that does not destroy its group) is no failure.
TEST(Leaving, ARankThatEndsIsWaitedForNoLonger) {
  const auto body = [](Group& group) {
    group.barrier().wait();
    if (group.rank() == 1) _exit(0);
    EXPECT_TRUE(leave(group, 60s));
  };
  EXPECT_EQ(run_processes(2, body), (std::vector<int>{0, 0}));
}

// Nobody reads what a rank has written; a launcher sees with which status it ended.
TEST(Leaving, AProgramThatLeftACallOutFails) {
  const auto body = [](Group& group) {
    {
      World world(std::make_shared<transport::FileStore>(*config::env("CHORALE_TEST_STORE")), group.rank(), 2);
      world.group().barrier().wait();
      if (group.rank() == 0) message_blaming(1, [&] { world.group().barrier().wait(); });
    }
    std::exit(testing::Test::HasFailure() ? 7 : 0);
  };
  EXPECT_EQ(run_processes(2, body), (std::vector<int>{0, 1}));
}

TEST(Leaving, AWrongPatienceIsAnErrorAtTheStart) {
  for (const char* wrong : {"x", "-1", "5s"}) {
    const EnvironmentVariable patience("CHORALE_LEAVE_PATIENCE", wrong);
    World world;
    EXPECT_THAT(message_of([&] { world.init(std::make_shared<transport::MemoryStore>(), 0, 1); }),
                HasSubstr(concat("CHORALE_LEAVE_PATIENCE is '", wrong, "'; it takes a number of seconds")));
  }
}

TEST(Leaving, AWorldThatEndsSaysIt) {
  const auto store = std::make_shared<transport::MemoryStore>();
  run_ranks(2, [&](Group& group) {
    World world(store, group.rank(), 2);
    world.group().barrier().wait();
    if (group.rank() == 1) {
      EXPECT_THAT(message_blaming(1, [&] { world.destroy(); }), HasSubstr("barrier #2, a call that this rank"));
      EXPECT_FALSE(world.is_initialized());
    } else {
      message_blaming(1, [&] { world.group().barrier().wait(); });
    }
  });
}

}  // namespace
}  // namespace chorale::comm
