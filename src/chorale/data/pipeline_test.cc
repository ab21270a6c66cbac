#include "chorale/data/pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

namespace chorale::data {
namespace {

// Claims 0 … count - 1; a job sleeps for a time that has nothing to do with its place, and gives its number.
Pipeline::Claim numbers(int count, int bad_job = -1, int bad_claim = -1) {
  return [=, next = 0]() mutable -> Pipeline::Job {
    if (next == bad_claim) throw std::out_of_range("claim");
    if (next == count) return {};
    return [=, number = next++] {
      std::this_thread::sleep_for(std::chrono::microseconds(number * 7919 % 200));
      if (number == bad_job) throw std::runtime_error("job");
      return std::make_shared<int>(number);
    };
  };
}
int number_of(const Pipeline::Result& result) { return result ? *static_cast<int*>(result.get()) : -1; }

TEST(Pipeline, HandsResultsOutInTheOrderOfClaims) {
  for (const int workers : {0, 1, 2, 7}) {
    Pipeline pipeline(numbers(100), workers, 2 * workers);
    for (int i = 0; i < 100; ++i) ASSERT_EQ(number_of(pipeline.next()), i);
    EXPECT_EQ(pipeline.next(), nullptr);
    EXPECT_EQ(pipeline.next(), nullptr);
  }
}

TEST(Pipeline, ClaimsOneAtATime) {
  std::atomic<int> inside = 0;
  int unguarded = 0;  // ThreadSanitizer watches
  Pipeline pipeline(
      [&]() -> Pipeline::Job {
        EXPECT_EQ(inside++, 0);
        ++unguarded;
        --inside;
        if (unguarded > 200) return {};
        return [] { return std::make_shared<int>(0); };
      },
      4, 8);
  int count = 0;
  while (pipeline.next()) ++count;
  EXPECT_EQ(count, 200);
}

TEST(Pipeline, RethrowsInPlaceAndEnds) {
  for (const int workers : {0, 1, 3}) {
    Pipeline jobs(numbers(100, 5), workers, 3 * workers);
    for (int i = 0; i < 5; ++i) ASSERT_EQ(number_of(jobs.next()), i);
    EXPECT_THROW(jobs.next(), std::runtime_error);
    EXPECT_EQ(jobs.next(), nullptr);
    Pipeline claims(numbers(100, -1, 5), workers, 3 * workers);
    for (int i = 0; i < 5; ++i) ASSERT_EQ(number_of(claims.next()), i);
    EXPECT_THROW(claims.next(), std::out_of_range);
    EXPECT_EQ(claims.next(), nullptr);
  }
}

TEST(Pipeline, LeavesNothingBehindWhenItIsDroppedAtAnyMoment) {
  for (int taken = 0; taken < 40; ++taken) {
    const auto alive = std::make_shared<int>(0);  // shared by claims, jobs and results
    {
      Pipeline pipeline(
          [claim = numbers(30), alive]() mutable -> Pipeline::Job {
            const Pipeline::Job job = claim();
            if (!job) return {};
            return [job, alive] {
              return std::make_shared<std::pair<Pipeline::Result, std::shared_ptr<int>>>(job(), alive);
            };
          },
          3, 4);
      for (int i = 0; i < taken; ++i) EXPECT_EQ(pipeline.next() != nullptr, i < 30);
    }
    EXPECT_EQ(alive.use_count(), 1);
  }
}

}  // namespace
}  // namespace chorale::data
