#include "chorale/base/generator.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <set>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/base/generator_scope.h"

namespace chorale {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers that come with Random123, the authors' own implementation.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(base::philox(0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(base::philox(~0ull, ~0ull, ~0ull), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(base::philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, AWordOfAStreamIsAWordOfItsBlock) {
  const RandomStream stream{7, 100};
  EXPECT_EQ(base::random_word(stream, 0), base::philox(7, 100)[0]);
  EXPECT_EQ(base::random_word(stream, 3), base::philox(7, 100)[3]);
  EXPECT_EQ(base::random_word(stream, 9), base::philox(7, 102)[1]);
}

TEST(Philox, UniformNumbersStayBelowOne) {
  EXPECT_EQ(base::uniform_f32(0), 0.0f);
  EXPECT_EQ(base::uniform_f32(~0u), 1.0f - 0x1p-24f);
  EXPECT_EQ(base::uniform_f64(0, 0), 0.0);
  EXPECT_EQ(base::uniform_f64(~0u, ~0u), 1.0 - 0x1p-53);
}

TEST(Generator, StretchesFollowEachOtherWithoutOverlap) {
  Generator generator(5);
  EXPECT_EQ(generator.take(1), (RandomStream{5, 0}));
  EXPECT_EQ(generator.take(4), (RandomStream{5, 1}));
  EXPECT_EQ(generator.take(0), (RandomStream{5, 2}));
  EXPECT_EQ(generator.take(9), (RandomStream{5, 2}));
  EXPECT_EQ(generator.state(), (RandomStream{5, 5}));
}

TEST(Generator, GoesOnFromARestoredState) {
  Generator generator(5);
  generator.take(100);
  const RandomStream saved = generator.state();
  const RandomStream next = generator.take(8);
  generator.restore(saved);
  EXPECT_EQ(generator.take(8), next);
  generator.reseed(6);
  EXPECT_EQ(generator.state(), (RandomStream{6, 0}));
}

TEST(Generator, ForksDependOnSeedAndIndexOnly) {
  Generator generator(5);
  std::set<uint64_t> seeds{5};
  for (uint64_t rank = 0; rank < 1000; ++rank) seeds.insert(generator.fork(rank).state().seed);
  EXPECT_EQ(seeds.size(), 1001u);
  const uint64_t before = generator.fork(3).state().seed;
  generator.take(12345);
  EXPECT_EQ(generator.fork(3).state().seed, before);
  EXPECT_NE(Generator(6).fork(3).state().seed, before);
}

TEST(Generator, RefusesANegativeCountAndStaysWhereItWas) {
  Generator generator(5);
  EXPECT_THROW(generator.take(-1), InvalidArgument);
  EXPECT_EQ(generator.state(), (RandomStream{5, 0}));
}

TEST(Generator, ManualSeedStartsTheDefaultStreamOver) {
  default_generator().take(10);
  manual_seed(42);
  EXPECT_EQ(default_generator().state(), (RandomStream{42, 0}));
  manual_seed(0);
}

// Runs in a process of its own, where nobody has drawn yet: prints the state of the default stream, and after a seed.
[[noreturn]] void print_first_states(const char* rank) {
  setenv("RANK", rank, 1);
  const uint64_t first = default_generator().state().seed;
  manual_seed(7);
  std::cerr << first << " " << default_generator().state().seed;
  std::exit(0);
}

TEST(GeneratorDeathTest, RanksThatNobodySeededDrawFromStreamsOfTheirOwn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_first_states("0"), testing::ExitedWithCode(0), "^0 7$");
  const uint64_t forked = Generator().fork(3).state().seed;
  EXPECT_EXIT(print_first_states("3"), testing::ExitedWithCode(0), concat("^", forked, " 7$"));
}

TEST(Generator, AScopeGivesItsThreadAStreamOfItsOwn) {
  manual_seed(42);
  Generator mine(7), inner(8);
  {
    const GeneratorScope scope(mine);
    default_generator().take(4);
    {
      const GeneratorScope nested(inner);
      manual_seed(9);
    }
    EXPECT_EQ(&default_generator(), &mine);
    std::thread([] { EXPECT_EQ(default_generator().state(), (RandomStream{42, 0})); }).join();
  }
  EXPECT_EQ(mine.state(), (RandomStream{7, 1}));
  EXPECT_EQ(inner.state(), (RandomStream{9, 0}));
  EXPECT_EQ(default_generator().state(), (RandomStream{42, 0}));
  manual_seed(0);
}

}  // namespace
}  // namespace chorale
