// The model families against transformers and torchvision (tools/oracle/record_models.py), which need not be there.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "chorale/api/api.h"
#include "chorale/base/parallel_for.h"
#include "chorale/models/bert.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/resnet.h"
#include "chorale/nn/oracle_file_test_util.h"
#include "chorale/op/samples.h"

namespace chorale::models {
namespace {

using nn::oracle::compare;
using nn::oracle::Json;

Tensor ids(const Shape& sizes, int seed, int64_t high) { return op::sample_ints(sizes, 0, high, seed); }

// Names of the state dict, logits, loss, gradients and buffers.
void check(const nn::Module& model, const Tensor& logits, const Tensor& target, const Json& expected) {
  std::vector<std::string> names;
  for (const auto& [name, value] : model.state_dict()) names.push_back(name);
  std::vector<std::string> wanted = expected["names"].get<std::vector<std::string>>();
  std::sort(names.begin(), names.end());
  std::sort(wanted.begin(), wanted.end());
  EXPECT_EQ(names, wanted);
  compare(logits, expected["logits"], 1e-10, "logits");
  const Tensor loss = cross_entropy(flatten(logits, 0, -2), flatten(target));
  EXPECT_NEAR(loss.item<double>(), expected["loss"].get<double>(), 1e-10);
  if (!expected.contains("grad")) return;
  backward(loss);
  size_t compared = 0;
  for (const auto& [name, parameter] : model.named_parameters()) {
    if (!expected["grad"].contains(name)) continue;
    compare(gradient(parameter), expected["grad"][name], 1e-9, "gradient of " + name);
    ++compared;
  }
  EXPECT_EQ(compared, expected["grad"].size());
  for (const auto& [name, buffer] : model.named_buffers()) {
    if (expected["buffers"].contains(name)) compare(buffer, expected["buffers"][name], 1e-9, name);
  }
}

TEST(ModelOracle, Gpt2IsThatOfTransformersAndSoAreItsGreedyTokens) {
  const Json expected = nn::oracle::read_oracle("models.json")["gpt2"];
  Gpt2 model({.vocab_size = 23, .n_positions = 24, .n_embd = 12, .n_layer = 2, .n_head = 3});
  model.to(DType::kF64);
  fill_by_formula(model);
  model.eval();
  const Tensor x = ids({2, 7}, 1, 23);
  check(model, model(x), ids({2, 7}, 2, 23), expected);
  const Tensor generated = model.generate(x, {.max_new_tokens = 12});
  std::vector<int64_t> wanted;
  for (const Json& row : expected["generated"]) {
    for (const Json& token : row) wanted.push_back(token);
  }
  EXPECT_EQ(generated.to_vector<int64_t>(), wanted);
}

TEST(ModelOracle, BertIsThatOfTransformers) {
  BertForMaskedLM model({.vocab_size = 23,
                         .hidden_size = 12,
                         .num_hidden_layers = 2,
                         .num_attention_heads = 3,
                         .intermediate_size = 20,
                         .max_position_embeddings = 10});
  model.to(DType::kF64);
  fill_by_formula(model);
  model.eval();
  const Tensor mask = Tensor::from({1L, 1L, 1L, 1L, 1L, 1L, 1L, 1L, 1L, 1L, 1L, 0L, 0L, 0L}, {2, 7});
  const Tensor logits =
      model(BertInput{.input_ids = ids({2, 7}, 1, 23), .attention_mask = mask, .token_type_ids = ids({2, 7}, 3, 2)});
  check(model, logits, ids({2, 7}, 2, 23), nn::oracle::read_oracle("models.json")["bert"]);
}

void check_resnet(ResNet model, int64_t size, bool train, const char* name) {
  set_thread_count(1);  // tests run side by side
  model.to(DType::kF64);
  fill_by_formula(model);
  model.train(train);
  model.requires_grad_(train);
  const Tensor logits = model(op::sample({2, 3, size, size}, 1, -1, 1));
  check(model, logits, ids({2}, 2, 7), nn::oracle::read_oracle("models.json")[name]);
}

TEST(ModelOracle, ResNet18InTrainingIsThatOfTorchvision) { check_resnet(resnet18(7), 64, true, "resnet18"); }
TEST(ModelOracle, ResNet50InEvaluationIsThatOfTorchvision) { check_resnet(resnet50(7), 40, false, "resnet50"); }

}  // namespace
}  // namespace chorale::models
