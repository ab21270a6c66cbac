#include "chorale/models/gpt2.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/models/bert.h"
#include "chorale/op/samples.h"

namespace chorale::models {
namespace {

const Gpt2Config kSmall{.vocab_size = 19, .n_positions = 16, .n_embd = 8, .n_layer = 2, .n_head = 2};

Gpt2 small_model() {
  manual_seed(1);
  Gpt2 model(kSmall);
  // Larger weights than one trains from: outputs then depend on every token.
  const NoGrad quiet;
  for (const Tensor& parameter : model.parameters()) mul_(parameter, 10);
  model.eval();
  return model;
}
Tensor ids(const Shape& sizes, int seed = 0) { return op::sample_ints(sizes, 0, 19, seed); }

TEST(Gpt2, HasTheSizeOfThePublishedModel) {
  // A layer of the small model, and a shorter vocabulary than its 50,257 tokens; the whole has 124,439,808.
  EXPECT_EQ(Gpt2({.vocab_size = 57, .n_layer = 1}).parameter_count(), 124439808 - 11 * 7087872 - 50200 * 768);
}

TEST(Gpt2, WithACacheInAnyChunksGivesTheSameLogits) {
  Gpt2 model = small_model();
  const NoGrad quiet;
  const Tensor x = ids({2, 9});
  const auto expected = model(x).to_vector<double>();
  for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{9}, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {4, 3, 2}, {2, 7}}) {
    Gpt2Cache cache(kSmall, 2, 9);
    std::vector<Tensor> parts;
    parts.reserve(chunks.size());
    for (const int64_t size : chunks) parts.push_back(model(narrow(x, 1, cache.length, size), &cache));
    EXPECT_EQ(cache.length, 9);
    const auto actual = cat(parts, 1).to_vector<double>();
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 1e-4 * (1 + std::abs(expected[i])));
  }
}

TEST(Gpt2, LooksAtEarlierTokensOnly) {
  Gpt2 model = small_model();
  const Tensor x = ids({1, 8}), y = clone(x);
  fill_(select(y, 1, 5), (select(x, 1, 5).item<int64_t>() + 1) % 19);
  const Tensor difference = amax(abs(model(x) - model(y)), {0, 2});
  for (int64_t i = 0; i < 8; ++i) {
    const double d = select(difference, 0, i).item<double>();
    EXPECT_TRUE(i < 5 ? d < 1e-5 : d > 1e-3) << i << " " << d;
  }
}

TEST(Gpt2, TheHeadIsTheTokenEmbeddingAlsoAfterCloningAndLoading) {
  Gpt2 model = small_model();
  Gpt2 copy = nn::clone(model);
  EXPECT_TRUE(copy.lm_head.weight.is(copy.transformer.wte.weight));
  // A file of Hugging Face's leaves out the tied name.
  NamedTensors state = model.state_dict();
  std::erase_if(state, [](const auto& entry) { return entry.first == "lm_head.weight"; });
  Gpt2 loaded(kSmall);
  loaded.load_state_dict(state);
  EXPECT_EQ(loaded.lm_head.weight.to_vector<float>(), model.lm_head.weight.to_vector<float>());
}

TEST(Gpt2, GenerationStopsAtTheEndTokenAndFillsUp) {
  Gpt2 model = small_model();
  const Tensor x = ids({3, 4}, 2);
  const Tensor all_tokens = model.generate(x, {.max_new_tokens = 8});
  ASSERT_EQ(all_tokens.sizes(), (Shape{3, 12}));
  const auto row = select(all_tokens, 0, 0).to_vector<int64_t>();
  const int64_t eos = row[5];  // what the first sequence generates second
  const Tensor cut = model.generate(x, {.max_new_tokens = 8, .eos_token = eos});
  for (int64_t b = 0; b < 3; ++b) {
    bool ended = false;
    for (int64_t i = 4; i < cut.size(1); ++i) {
      const auto token = select(select(cut, 0, b), 0, i).item<int64_t>();
      const auto free = select(select(all_tokens, 0, b), 0, i).item<int64_t>();
      EXPECT_EQ(token, ended ? eos : free) << b << " " << i;
      ended = ended || token == eos;
    }
    EXPECT_TRUE(ended || cut.size(1) == 12);
  }
}

TEST(Gpt2, BadInput) {
  Gpt2 model = small_model();
  EXPECT_THROW(model(ids({1, 17})), InvalidArgument);
  EXPECT_THROW(model(ids({3})), InvalidArgument);
  EXPECT_THROW(model.generate(ids({1, 10}), {.max_new_tokens = 7}), InvalidArgument);
  EXPECT_THROW(model.generate(ids({1, 0})), InvalidArgument);
  EXPECT_THROW(Gpt2Cache(kSmall, 1, 17), InvalidArgument);
  Gpt2Cache cache(kSmall, 1, 4);
  EXPECT_THROW(model(ids({1, 2}), &cache), StateError);
  EXPECT_THROW(Gpt2({.n_embd = 8, .n_head = 3}), InvalidArgument);
}

TEST(Bert, WithoutMaskAndTypesItTakesOnesAndZeros) {
  manual_seed(2);
  BertForMaskedLM model({.vocab_size = 19,
                         .hidden_size = 8,
                         .num_hidden_layers = 2,
                         .num_attention_heads = 2,
                         .intermediate_size = 16,
                         .max_position_embeddings = 12});
  model.eval();
  const Tensor x = ids({2, 5});
  const auto plain = model(BertInput{x}).to_vector<float>();
  const auto full_masks = model(BertInput{x, ones({2, 5}, DType::kI64), zeros({2, 5}, DType::kI64)}).to_vector<float>();
  EXPECT_THAT(plain, ::testing::Pointwise(::testing::FloatNear(1e-6f), full_masks));
  EXPECT_THROW(model(BertInput{ids({2, 13})}), InvalidArgument);
  EXPECT_THROW(model(BertInput{x, ones({2, 4})}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::models
