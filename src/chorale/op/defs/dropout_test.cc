#include "chorale/base/parallel_for.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"

namespace chorale {
namespace {

using testing::HasSubstr;

TEST(Dropout, DropsWhatTheRandomWordsSay) {
  Generator generator(7);
  generator.take(4);
  const RandomStream stream = generator.state();
  const Tensor x = iota<float>({11}, 1.0f), y = dropout(x, 0.25, true, generator);
  for (size_t i = 0; i < 11; ++i) {
    const bool dropped = base::random_word(stream, i) < 1u << 30;
    EXPECT_EQ(values(y)[i], dropped ? 0 : static_cast<double>(x.span<float>()[i] * static_cast<float>(4.0 / 3))) << i;
  }
  EXPECT_EQ(generator.state(), (RandomStream{7, 4}));
}

TEST(Dropout, IsTheSameInEveryDtypeAndWithEveryNumberOfThreads) {
  const Tensor x = ones({100003}, DType::kF64);
  const auto mask = [&](DType dtype, int threads) {
    set_thread_count(threads);
    Generator generator(3);
    std::vector<bool> kept;
    for (double v : values(dropout(as(x, dtype), 0.5, true, generator))) kept.push_back(v != 0);
    return kept;
  };
  const int before = thread_count();
  const auto expected = mask(DType::kF64, 1);
  for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16})
    EXPECT_EQ(mask(dtype, 3), expected) << dtype;
  set_thread_count(before);
}

TEST(Dropout, DropsTheGivenShareAndKeepsTheMean) {
  Generator generator(1);
  for (double p : {0.1, 0.5, 0.9}) {
    const auto y = values(dropout(ones({200000}, DType::kF64), p, true, generator));
    const auto dropped = static_cast<double>(std::count(y.begin(), y.end(), 0.0)) / 200000;
    // Five standard deviations.
    EXPECT_NEAR(dropped, p, 5 * std::sqrt(p * (1 - p) / 200000));
    for (double v : y) ASSERT_TRUE(v == 0 || std::abs(v - 1 / (1 - p)) < 1e-12);
  }
}

TEST(Dropout, AdvancesItsGeneratorOnlyWhenItDraws) {
  Generator generator(1);
  const Tensor x = ones({10});
  EXPECT_TRUE(dropout(x, 0.5, false, generator).is(x));
  EXPECT_TRUE(dropout(x, 0, true, generator).is(x));
  EXPECT_EQ(generator.state(), (RandomStream{1, 0}));
  EXPECT_NE(values(dropout(ones({64}), 0.5, true, generator)), values(dropout(ones({64}), 0.5, true, generator)));
  expect_values(dropout(x, 1, true, generator), std::vector<double>(10, 0));
}

TEST(Dropout, OfFeaturesDropsWholeChannels) {
  Generator generator(2);
  const auto y = values(feature_dropout(ones({8, 16, 5}, DType::kF64), 0.5, true, generator));
  int dropped = 0;
  for (size_t channel = 0; channel < 8 * 16; ++channel) {
    for (size_t i = 1; i < 5; ++i) EXPECT_EQ(y[channel * 5 + i], y[channel * 5]);
    dropped += y[channel * 5] == 0;
  }
  EXPECT_GT(dropped, 30);
  EXPECT_LT(dropped, 100);
}

TEST(Dropout, RefusesAProbabilityThatIsNone) {
  EXPECT_THAT(message_of([] { dropout(ones({2}), 1.5); }), HasSubstr("1.5"));
  EXPECT_THAT(message_of([] { dropout(ones({2}), -0.1); }), HasSubstr("-0.1"));
  EXPECT_THAT(message_of([] { feature_dropout(ones({2}), 0.5); }), HasSubstr("[2]"));
}

}  // namespace
}  // namespace chorale
