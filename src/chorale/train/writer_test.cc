#include "chorale/train/writer.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"

namespace chorale::train {
namespace {

models::Gpt2 small_model() {
  manual_seed(3);
  models::Gpt2 model({.vocab_size = 256, .n_positions = 16, .n_embd = 8, .n_layer = 1, .n_head = 2});
  const NoGrad quiet;
  for (const Tensor& parameter : model.parameters()) mul_(parameter, 10);  // so that tokens matter
  model.eval();
  return model;
}

TEST(Writer, GoesOnBeyondTheContext) {
  models::Gpt2 model = small_model();
  std::string streamed;
  int64_t pieces = 0;
  const std::string text = write_text(model, Tokenizer::bytes(), "In the",
                                      {.tokens = 100, .temperature = 0, .on_text = [&](const std::string& piece) {
                                         streamed += piece;
                                         ++pieces;
                                       }});
  EXPECT_TRUE(text.starts_with("In the"));
  EXPECT_EQ(streamed, text);
  EXPECT_GT(pieces, 10);
  EXPECT_GE(text.size(), 106u);  // a byte that is no character becomes three
}
TEST(Writer, TheFirstTokensAreThoseOfGenerate) {
  models::Gpt2 model = small_model();
  const Tokenizer bytes = Tokenizer::bytes();
  const Tensor ids = model.generate(Tensor::from(std::vector<int64_t>{'a', 'b'}, {1, 2}), {.max_new_tokens = 14});
  std::vector<int32_t> expected;
  for (const int64_t id : ids.to_vector<int64_t>()) expected.push_back(static_cast<int32_t>(id));
  EXPECT_EQ(write_text(model, bytes, "ab", {.tokens = 14, .temperature = 0}), as_utf8(bytes.decode(expected)));
}
TEST(Writer, TheSameSeedGivesTheSameTextAndAnotherAnother) {
  models::Gpt2 model = small_model();
  const auto write = [&](uint64_t seed) {
    Generator numbers(seed);
    return write_text(model, Tokenizer::bytes(), "a", {.tokens = 40, .generator = &numbers});
  };
  EXPECT_EQ(write(1), write(1));
  EXPECT_NE(write(1), write(2));
}

}  // namespace
}  // namespace chorale::train
