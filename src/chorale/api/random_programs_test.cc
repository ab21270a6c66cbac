// Random programs, compiled and not: the same values, gradients and writes, at sizes that change from call to call. A
// program that fails is made smaller until nothing more can be left out, and printed.
#include "chorale/api/random_programs_test_util.h"

#include <gtest/gtest.h>

#include "chorale/base/config.h"

namespace chorale {
namespace {

using random_programs::mistake, random_programs::Program, random_programs::random_program, random_programs::shrink,
    random_programs::text_of;

class RandomPrograms : public testing::TestWithParam<bool> {};

TEST_P(RandomPrograms, GiveWhatEagerGives) {
  const bool whole = GetParam();
  const uint64_t seeds = config::env("CHORALE_SOAK") ? 5000 : 150;
  int resizes = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Program program = random_program(seed + (whole ? 1'000'000 : 0), whole);
    ASSERT_EQ(mistake(program, {.whole_graph = whole}, {}, &resizes), "")
        << "seed " << seed << ", the smallest program that differs:\n"
        << text_of(shrink(program, {.whole_graph = whole}, {}));
  }
  EXPECT_GT(resizes, static_cast<int>(seeds)) << "graphs with symbols were hardly ever used";
}

INSTANTIATE_TEST_SUITE_P(Compile, RandomPrograms, testing::Bool(),
                         [](const auto& row) { return row.param ? "Whole" : "Segmented"; });

}  // namespace
}  // namespace chorale
