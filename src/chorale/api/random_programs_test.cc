// Random programs, compiled and not: the same values, gradients and writes, at sizes that change from call to call. A
// program that fails is made smaller until nothing more can be left out, and printed.
#include "chorale/api/random_programs_test_util.h"
#include "chorale/testing/soak_test_util.h"

#include <gtest/gtest.h>

namespace chorale {
namespace {

using random_programs::mistake, random_programs::Program, random_programs::random_program, random_programs::shrink,
    random_programs::text_of;

constexpr double kBudgets[] = {1, 0, 0.5};

class RandomPrograms : public testing::TestWithParam<bool> {};

TEST_P(RandomPrograms, GiveWhatEagerGives) {
  const bool whole = GetParam();
  const auto seeds = static_cast<uint64_t>(seeds_to_try(150, 5000));
  int resizes = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Program program = random_program(seed + (whole ? 1'000'000 : 0), whole);
    // A segmented one may overwrite behind a break what a backward with little memory would read once more.
    const CompileOptions options{.whole_graph = whole, .memory_budget = whole ? kBudgets[seed % 3] : 1};
    ASSERT_EQ(mistake(program, options, {}, &resizes), "")
        << "seed " << seed << ", the smallest program that differs:\n"
        << text_of(shrink(program, options, {}));
  }
  EXPECT_GT(resizes, static_cast<int>(seeds)) << "graphs with symbols were hardly ever used";
}

INSTANTIATE_TEST_SUITE_P(Compile, RandomPrograms, testing::Bool(),
                         [](const auto& row) { return row.param ? "Whole" : "Segmented"; });

}  // namespace
}  // namespace chorale
