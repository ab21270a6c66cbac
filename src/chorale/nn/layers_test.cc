// What the comparison with PyTorch (oracle_test.cc) does not show: random behaviour, and bad input with its message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/nn/nn.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::nn {
namespace {

using ::testing::HasSubstr;

TEST(Dropout, DropsAShareInTrainingAndNothingInEvaluation) {
  manual_seed(1);
  Dropout layer(0.25);
  const Tensor x = ones({100, 100});
  const auto values = layer(x).to_vector<double>();
  const auto dropped = std::count(values.begin(), values.end(), 0.0);
  EXPECT_NEAR(static_cast<double>(dropped), 2500, 5 * std::sqrt(10000 * 0.25 * 0.75));
  EXPECT_FLOAT_EQ(static_cast<float>(*std::max_element(values.begin(), values.end())), 1 / 0.75f);
  layer.eval();
  EXPECT_TRUE(layer(x).is(x) || layer(x).to_vector<double>() == x.to_vector<double>());
  EXPECT_THAT(message_of([] { Dropout(1.5); }), HasSubstr("expected a probability between 0 and 1, found 1.5"));
}

TEST(Dropout2d, DropsWholeChannels) {
  manual_seed(1);
  Dropout2d layer(0.5);
  const auto sums = sum(layer(ones({10, 20, 3, 3})), {2, 3}).to_vector<double>();
  for (const double s : sums) EXPECT_TRUE(s == 0 || s == 18) << s;
  EXPECT_NEAR(static_cast<double>(std::count(sums.begin(), sums.end(), 0.0)), 100, 5 * std::sqrt(200 * 0.25));
}

TEST(Recurrent, DropoutIsBetweenLayersAndInTrainingOnly) {
  manual_seed(1);
  GRU one(3, 4, {.num_layers = 1, .dropout = 0.9}), two(3, 4, {.num_layers = 2, .dropout = 0.9});
  const Tensor x = ones({5, 2, 3});
  const auto run = [&](GRU& layer) { return layer(x).output.template to_vector<float>(); };
  EXPECT_EQ(run(one), run(one));
  EXPECT_NE(run(two), run(two));
  two.eval();
  EXPECT_EQ(run(two), run(two));
}

TEST(Embedding, RowsThatAreLookedUpAreScaledToTheLargestNorm) {
  const Embedding table(4, 2, {.max_norm = 5});
  {
    const NoGrad quiet;
    copy_(table.weight, Tensor::from<float>({3, 4, 6, 8, 30, 40, 0, 0}, {4, 2}));
  }
  const Tensor y = table(Tensor::from<int64_t>({1, 3, 1, 0}, {4}));
  const std::vector<float> expected = {3, 4, 3, 4, 30, 40, 0, 0}, found = table.weight.to_vector<float>();
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5) << i << ": row 2 was not looked up";
  EXPECT_NEAR(y.to_vector<float>()[0], 3, 1e-5);
  backward(sum(y));
  EXPECT_EQ(gradient(table.weight).to_vector<float>(), (std::vector<float>{1, 1, 2, 2, 0, 0, 1, 1}));
}

TEST(BadInput, IsNamedWithWhatWasExpected) {
  EXPECT_THAT(message_of([] { Linear(-1, 2); }), HasSubstr("[Linear] expected sizes of at least 0, found -1"));
  EXPECT_THAT(message_of([] { Linear(3, 2)(ones({4, 5})); }), HasSubstr("linear"));
  EXPECT_THAT(message_of([] {
                Bilinear(3, 4, 2)(ones({5, 3}), ones({5, 5}));
              }),
              HasSubstr("expected [.., 3] and [.., 4]"));
  EXPECT_THAT(message_of([] { Embedding(4, 2, {.padding_idx = 4}); }), HasSubstr("padding_idx 4 is outside of 4 rows"));
  EXPECT_THAT(message_of([] { Conv2d(3, 4, {}); }), HasSubstr("expected one entry or 2 for kernel, found 0"));
  EXPECT_THAT(message_of([] { Conv2d(3, 4, {.kernel = {1, 2, 3}}); }), HasSubstr("for kernel, found 3"));
  EXPECT_THAT(message_of([] { Conv2d(3, 4, {.kernel = 3, .groups = 2}); }), HasSubstr("multiples of groups"));
  EXPECT_THAT(message_of([] { Conv2d(3, 4, 0); }), HasSubstr("at least one element in each direction, not 0"));
  EXPECT_THAT(message_of([] { ConvTranspose2d(3, 4, {.kernel = {2, -1}}); }), HasSubstr("each direction, not -1"));
  EXPECT_THAT(message_of([] {
                BatchNorm2d(3)(ones({2, 4, 5, 5}));
              }),
              HasSubstr("[BatchNorm2d] expected 3 channels in [N, C, H, W], found shape [2, 4, 5, 5]"));
  EXPECT_THAT(message_of([] { BatchNorm2d(3)(ones({2, 3})); }), HasSubstr("found shape [2, 3]"));
  EXPECT_THAT(message_of([] { InstanceNorm1d(3)(ones({2})); }), HasSubstr("InstanceNorm1d"));
  EXPECT_THAT(message_of([] { LayerNorm(IntList{}); }), HasSubstr("at least one dimension"));
  EXPECT_THAT(message_of([] { GroupNorm(2, 5); }), HasSubstr("5 channels cannot be cut into 2"));
  EXPECT_THAT(message_of([] { GroupNorm(2, 4)(ones({1, 6})); }), HasSubstr("expected 4 channels"));
  EXPECT_THAT(message_of([] { GLU()(ones({2, 3})); }), HasSubstr("even size"));
  EXPECT_THAT(message_of([] { PReLU(3)(ones({2, 4})); }), HasSubstr("expected 3 channels"));
  EXPECT_THAT(message_of([] { AvgPool1d(2, {.divisor_override = 3}); }), HasSubstr("two dimensions"));
  EXPECT_THAT(message_of([] { BCELoss({.pos_weight = ones({1})}); }), HasSubstr("BCEWithLogitsLoss"));
}

TEST(BadInput, UndefinedTensorsAreNamedByLayersThatLookAtThem) {
  const Tensor none, x = ones({2, 4, 4});
  const auto expect_named = [](const char* expected, const auto& call) {
    EXPECT_THAT(message_of(call), HasSubstr(concat(expected, " is an undefined tensor")));
  };
  expect_named("[linear] x (input 0)", [&] { Linear(4, 4)(none); });
  expect_named("[conv2d] x", [&] { Conv2d(4, 4, 1)(none); });
  expect_named("[BatchNorm1d] x", [&] { BatchNorm1d(4)(none); });
  expect_named("[InstanceNorm1d] x", [&] { InstanceNorm1d(4)(none); });
  expect_named("[GroupNorm] x", [&] { GroupNorm(2, 4)(none); });
  expect_named("[LSTM] x", [&] { LSTM(4, 4)(none); });
  expect_named("[GRU] x", [&] { GRU(4, 4)(none); });
  expect_named("[MultiheadAttention] query", [&] { MultiheadAttention(4, 1)(none, x, x); });
  expect_named("[MultiheadAttention] key", [&] { MultiheadAttention(4, 1)(x, none, x); });
  expect_named("[MultiheadAttention] value", [&] { MultiheadAttention(4, 1)(x, x, none); });
  expect_named("[Bilinear] x1", [&] { Bilinear(4, 4, 4)(none, x); });
  expect_named("[Bilinear] x2", [&] { Bilinear(4, 4, 4)(x, none); });
  expect_named("[GLU] x", [&] { GLU()(none); });
  expect_named("[PReLU] x", [&] { PReLU()(none); });
  expect_named("[uniform_] x", [&] { init::uniform_(none); });
  expect_named("[xavier_normal_] weight", [&] { init::xavier_normal_(none); });
  expect_named("[flex_attention] k", [&] { flex_attention(x, none, x); });
}

TEST(BadInput, OfRecurrentLayersAndAttention) {
  EXPECT_THAT(message_of([] { LSTM(0, 3); }), HasSubstr("positive sizes"));
  EXPECT_THAT(message_of([] { LSTM(3, 4)(ones({5, 2, 2})); }), HasSubstr("[LSTM] expected [time, batch, 3]"));
  EXPECT_THAT(message_of([] { GRU(3, 4)(ones({0, 2, 3})); }), HasSubstr("at least one step"));
  EXPECT_THAT(message_of([] {
                GRU(3, 4)(ones({5, 2, 3}), ones({2, 2, 4}));
              }),
              HasSubstr("expected a state of shape [1, 2, 4]"));
  EXPECT_THAT(message_of([] {
                LSTM(3, 4)(ones({5, 2, 3}), {ones({1, 2, 4}), Tensor()});
              }),
              HasSubstr("[LSTM] a state is h and c, or neither; c of this one is an undefined tensor"));
  EXPECT_THAT(message_of([] { MultiheadAttention(6, 4); }), HasSubstr("cannot be cut into 4 heads"));
  MultiheadAttention attention(6, 2);
  const Tensor x = ones({4, 2, 6});
  EXPECT_THAT(message_of([&] { attention(x, ones({4, 2, 5}), x); }), HasSubstr("widths 6, 6, 6"));
  EXPECT_THAT(message_of([&] { attention(x, ones({4, 3, 6}), ones({4, 3, 6})); }), HasSubstr("batches or lengths"));
  EXPECT_THAT(message_of([&] {
                attention(x, x, x, AttentionMasks{.attn_mask = ones({4, 3})});
              }),
              HasSubstr("expected an attn_mask [4, 4] or [4, 4, 4]"));
  EXPECT_THAT(message_of([&] {
                attention(x, x, x, AttentionMasks{.key_padding_mask = ones({4, 2})});
              }),
              HasSubstr("expected a key_padding_mask [2, 4]"));
}

TEST(BatchNorm, RefusesToTrainOnOneValuePerChannel) { EXPECT_THROW(BatchNorm1d(3)(ones({1, 3})), InvalidArgument); }

TEST(MultiheadAttention, MasksPerHeadAndOfBothKindsAddUp) {
  manual_seed(3);
  MultiheadAttention attention(4, 2, {.batch_first = true});
  const Tensor x = normal({2, 3, 4});
  const Tensor later = gt(arange(3), unsqueeze(arange(3), 1));
  const Tensor added = masked_fill(zeros({3, 3}), later, -INFINITY);
  const auto run = [&](const AttentionMasks& masks) { return attention(x, x, x, masks).output.to_vector<float>(); };
  const auto expected = run({.is_causal = true});
  EXPECT_THAT(run({.attn_mask = later}), ::testing::Pointwise(::testing::FloatNear(1e-6f), expected));
  EXPECT_THAT(run({.attn_mask = added}), ::testing::Pointwise(::testing::FloatNear(1e-6f), expected));
  const Tensor per_head = repeat(unsqueeze(later, 0), {4, 1, 1});
  EXPECT_THAT(run({.attn_mask = per_head}), ::testing::Pointwise(::testing::FloatNear(1e-6f), expected));
  const Tensor none = zeros({2, 3}, DType::kBool);
  EXPECT_THAT(run({.attn_mask = added, .key_padding_mask = none, .need_weights = true}),
              ::testing::Pointwise(::testing::FloatNear(1e-6f), expected));
  EXPECT_THAT(run({.key_padding_mask = none, .is_causal = true}),
              ::testing::Pointwise(::testing::FloatNear(1e-6f), expected));
}

}  // namespace
}  // namespace chorale::nn
