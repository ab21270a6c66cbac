#include "chorale/op/input_set.h"

#include <gtest/gtest.h>

namespace chorale::op {
namespace {

TEST(InputSet, HasWhatItWasGiven) {
  constexpr InputSet set{0, 3, 30};
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(set.has(i), i == 0 || i == 3 || i == 30) << i;
  EXPECT_FALSE(set.empty());
  EXPECT_TRUE(InputSet{}.empty());
}

TEST(InputSet, FromAPositionOnMeansEverythingBehindItToo) {
  for (size_t first : {0u, 1u, 2u, 30u}) {
    for (size_t i = 0; i < 100; ++i) EXPECT_EQ(InputSet::from(first).has(i), i >= first) << first << " " << i;
  }
  EXPECT_EQ(InputSet::from(0), InputSet::all());
}

TEST(InputSet, JoinsWithAnother) {
  const InputSet both = InputSet{0, 2} | InputSet::from(5);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(both.has(i), i == 0 || i == 2 || i >= 5) << i;
}

TEST(InputSet, PositionsBeyondTheLastBitShareIt) {
  InputSet set;
  set.add(500);
  for (size_t i = 0; i < 31; ++i) EXPECT_FALSE(set.has(i)) << i;
  for (size_t i : {31u, 32u, 63u, 64u, 500u, 1000u}) EXPECT_TRUE(set.has(i)) << i;
  EXPECT_EQ(set, InputSet::from(31));
}

}  // namespace
}  // namespace chorale::op
