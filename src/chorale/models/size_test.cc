#include "chorale/models/size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/models/checkpoint.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::models {
namespace {

using testing::HasSubstr;

TEST(ModelSize, IsThatOfTheModel) {
  const Gpt2Config gpt{.vocab_size = 31, .n_positions = 7, .n_embd = 12, .n_layer = 3, .n_head = 2};
  Gpt2 gpt_model(gpt);
  EXPECT_EQ(size_of(gpt).parameters, static_cast<double>(gpt_model.parameter_count()));
  EXPECT_EQ(size_of(gpt).tensors, static_cast<double>(gpt_model.named_parameters().size()));
  const BertConfig bert{.vocab_size = 31,
                        .hidden_size = 12,
                        .num_hidden_layers = 3,
                        .num_attention_heads = 2,
                        .intermediate_size = 17,
                        .max_position_embeddings = 7};
  BertForMaskedLM bert_model(bert);
  EXPECT_EQ(size_of(bert).parameters, static_cast<double>(bert_model.parameter_count()));
  EXPECT_EQ(size_of(bert).tensors, static_cast<double>(bert_model.named_parameters().size()));
}

TEST(ModelSize, OfAConfigurationIsComparedWithTheWeightsBeforeAnythingIsAllocated) {
  const TemporaryFolder folder;
  save_gpt2(folder.path(), Gpt2({.vocab_size = 31, .n_positions = 7, .n_embd = 12, .n_layer = 1, .n_head = 2}));
  for (const char* config :
       {R"({"vocab_size": 31, "n_positions": 7, "n_embd": 1000000, "n_layer": 1, "n_head": 2})",
        R"({"vocab_size": 31, "n_positions": 7, "n_embd": 12, "n_layer": 1000000000, "n_head": 2})",
        R"({"vocab_size": 31, "n_positions": 2000000000, "n_embd": 12, "n_layer": 1, "n_head": 2})"}) {
    folder.write("config.json", config);
    EXPECT_THAT(message_of([&] { load_gpt2(folder.path()); }), HasSubstr("they do not belong together")) << config;
  }
}

}  // namespace
}  // namespace chorale::models
