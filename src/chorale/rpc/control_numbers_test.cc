#include "chorale/rpc/control_numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace chorale::rpc {
namespace {

using Heard = ControlNumbers::Heard;

TEST(ControlNumbers, AreCountedForEachWorkerAndTicket) {
  ControlNumbers numbers;
  EXPECT_EQ(numbers.next({1, 0}), 1u);
  EXPECT_EQ(numbers.next({1, 0}), 2u);
  EXPECT_EQ(numbers.next({2, 0}), 1u);
  EXPECT_EQ(numbers.next({1, 7}), 1u);
  numbers.forget({1, 0});
  EXPECT_EQ(numbers.next({1, 0}), 1u);
}

TEST(ControlNumbers, OneThatComesWhileTheFirstIsHandledIsAnsweredWithIt) {
  ControlNumbers numbers;
  EXPECT_EQ(numbers.hear({1, 0}, 1, 10), Heard::kFirst);
  EXPECT_EQ(numbers.hear({1, 0}, 1, 11), Heard::kBusy);
  EXPECT_EQ(numbers.hear({2, 0}, 1, 12), Heard::kFirst);  // of another worker
  EXPECT_EQ(numbers.done({1, 0}, 1), std::vector<uint64_t>{11});
  EXPECT_EQ(numbers.hear({1, 0}, 1, 13), Heard::kDone);
  EXPECT_TRUE(numbers.done({3, 0}, 1).empty());
}

TEST(ControlNumbers, EachIsHandledOnceInAnyOrder) {
  std::vector<uint64_t> order;
  for (uint64_t i = 1; i <= 200; ++i) order.insert(order.end(), 3, i);
  std::mt19937 random(5);
  std::shuffle(order.begin(), order.end(), random);
  ControlNumbers numbers;
  std::vector<uint64_t> handled;
  for (const uint64_t number : order) {
    if (numbers.hear({0, 0}, number, 0) != Heard::kFirst) continue;
    handled.push_back(number);
    numbers.done({0, 0}, number);
  }
  EXPECT_EQ(handled.size(), 200u);
  for (uint64_t i = 1; i <= 200; ++i) EXPECT_EQ(numbers.hear({0, 0}, i, 0), Heard::kDone);
  EXPECT_EQ(numbers.hear({0, 0}, 201, 0), Heard::kFirst);
}

}  // namespace
}  // namespace chorale::rpc
