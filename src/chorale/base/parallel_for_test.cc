#include "chorale/base/parallel_for.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/host.h"

namespace chorale {
namespace {

using Piece = std::pair<int64_t, int64_t>;

std::vector<Piece> pieces_of(int64_t count, int64_t grain) {
  std::mutex mutex;
  std::vector<Piece> pieces;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    pieces.emplace_back(begin, end);
  });
  std::sort(pieces.begin(), pieces.end());
  return pieces;
}

class ParallelTest : public testing::Test {
 protected:
  void SetUp() override { set_thread_count(4); }
  void TearDown() override { set_thread_count(before_); }

 private:
  const int before_ = thread_count();
};

TEST_F(ParallelTest, PiecesCoverTheRangeOnceAndHaveAtLeastTheGrain) {
  for (const int threads : {1, 2, 3, 4, 7}) {
    set_thread_count(threads);
    for (const int64_t count : {1, 2, 3, 10, 63, 64, 65, 1000}) {
      for (const int64_t grain : {0, 1, 2, 16, 64, 5000}) {
        const std::vector<Piece> pieces = pieces_of(count, grain);
        int64_t at = 0;
        for (const auto& [begin, end] : pieces) {
          EXPECT_EQ(begin, at);
          EXPECT_GE(end - begin, std::min(std::max<int64_t>(grain, 1), count)) << count << " by " << grain;
          at = end;
        }
        EXPECT_EQ(at, count);
        EXPECT_LE(pieces.size(), static_cast<size_t>(threads));
      }
    }
  }
}

TEST_F(ParallelTest, TheCutIsTheSameEveryTime) {
  const std::vector<Piece> first = pieces_of(1003, 10);
  EXPECT_EQ(first.size(), 4u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(pieces_of(1003, 10), first);
}

TEST_F(ParallelTest, AnEmptyRangeCallsNothing) {
  parallel_for(0, 1, [](int64_t, int64_t) { FAIL(); });
  parallel_for(-5, 1, [](int64_t, int64_t) { FAIL(); });
}

TEST_F(ParallelTest, SmallWorkStaysOnTheCallingThread) {
  const auto caller = std::this_thread::get_id();
  parallel_for(100, 51, [&](int64_t begin, int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(Piece(begin, end), Piece(0, 100));
  });
}

TEST_F(ParallelTest, PiecesRunOnSeveralThreads) {
  // All four pieces meet before any may end: impossible on fewer than four threads.
  std::atomic<int> arrived{0};
  parallel_for(4, 1, [&](int64_t, int64_t) {
    ++arrived;
    while (arrived < 4) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 4);
}

TEST_F(ParallelTest, AnExceptionOfOnePieceReachesTheCallerAndTheOthersFinish) {
  std::atomic<int> finished{0};
  try {
    parallel_for(4, 1, [&](int64_t begin, int64_t) {
      if (begin == 2) throw InvalidArgument("piece 2");
      ++finished;
    });
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "piece 2");
  }
  EXPECT_EQ(finished, 3);
}

TEST_F(ParallelTest, WhenEveryPieceThrowsOneErrorArrives) {
  EXPECT_THROW(parallel_for(4, 1, [](int64_t, int64_t) { throw std::out_of_range("all"); }), std::out_of_range);
  EXPECT_EQ(pieces_of(4, 1).size(), 4u);  // and the threads are still there
}

TEST_F(ParallelTest, NestedCallsRunInline) {
  std::atomic<int64_t> sum{0};
  parallel_for(4, 1, [&](int64_t, int64_t) {
    const auto outer = std::this_thread::get_id();
    parallel_for(1000, 1, [&](int64_t begin, int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      EXPECT_EQ(Piece(begin, end), Piece(0, 1000));
      sum += end - begin;
    });
  });
  EXPECT_EQ(sum, 4000);
}

TEST_F(ParallelTest, SeveralThreadsMayCallAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int64_t> sum{0};
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      set_thread_count(2);
      for (int i = 0; i < 20; ++i) parallel_for(100, 10, [&](int64_t begin, int64_t end) { sum += end - begin; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 4 * 20 * 100);
}

TEST_F(ParallelTest, AThreadCountBelowOneIsAnErrorAndChangesNothing) {
  EXPECT_THROW(set_thread_count(0), InvalidArgument);
  EXPECT_THROW(set_thread_count(-3), InvalidArgument);
  EXPECT_EQ(thread_count(), 4);
}

TEST(FunctionRef, CallsWhatItRefersToWithoutCopying) {
  int calls = 0;
  auto count = [&calls](int by) mutable { return calls += by; };
  const base::FunctionRef<int(int)> ref(count);
  EXPECT_EQ(ref(2), 2);
  EXPECT_EQ(base::FunctionRef<int(int)>(ref)(3), 5);
  EXPECT_EQ(calls, 5);
}

// Note [Threads that wait]: CPU time, which other programs of the machine do not change.
TEST_F(ParallelTest, ThreadsSleepSoonAfterTheirWork) {
  const int threads = std::max(2, usable_cores());
  set_thread_count(threads);
  const auto work = [&] { EXPECT_EQ(pieces_of(threads, 1).size(), static_cast<size_t>(threads)); };
  const auto cpu_seconds = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  };
  work();  // the threads are there
  const double before = cpu_seconds();
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    work();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_LT((cpu_seconds() - before) / (kRounds * (threads - 1)), 1.5e-3) << "a thread spins after each piece of work";
}

}  // namespace
}  // namespace chorale
