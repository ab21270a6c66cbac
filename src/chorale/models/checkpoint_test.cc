#include "chorale/models/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "chorale/autograd/mode.h"
#include "chorale/io/safetensors.h"
#include "chorale/io/sharded.h"
#include "chorale/json/json.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::models {
namespace {

using testing::HasSubstr;

// What tools/oracle/checkpoints.py recorded.
std::filesystem::path recorded(const std::string& name) {
  for (auto at = std::filesystem::current_path();; at = at.parent_path()) {
    if (auto folder = at / "tests" / "oracle" / "checkpoints" / name; std::filesystem::exists(folder)) return folder;
    if (at == at.root_path()) throw std::runtime_error("no tests/oracle/checkpoints above the working directory");
  }
}

struct Expected {
  Tensor ids;
  std::vector<double> logits;
};
Expected expected(const std::string& name) {
  const auto file = io::MappedFile::open(recorded(name) / "logits.json");
  const json::Value root = json::parse("logits.json", file->text());
  std::vector<int64_t> ids;
  for (const json::Value& id : json::find(root.object(""), "ids")->array("")) ids.push_back(id.size(""));
  Expected result{Tensor::from(ids, {1, static_cast<int64_t>(ids.size())}), {}};
  for (const json::Value& row : json::find(root.object(""), "logits")->array("")) {
    for (const json::Value& value : row.array("")) result.logits.push_back(*value.as<double>());
  }
  return result;
}

void expect_near(const Tensor& logits, const std::vector<double>& wanted) {
  const auto found = logits.to_vector<double>();
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], wanted[i], 1e-4) << i;
}

// Every tensor that transformers wrote is in what we wrote, under its name and bit by bit.
void expect_holds(const NamedTensors& ours, const NamedTensors& theirs) {
  const std::map<std::string, Tensor> by_name(ours.begin(), ours.end());
  EXPECT_EQ(by_name.size(), theirs.size());
  for (const auto& [name, tensor] : theirs) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    EXPECT_EQ(by_name.at(name).dtype(), tensor.dtype());
    EXPECT_EQ(by_name.at(name).sizes(), tensor.sizes());
    EXPECT_EQ(by_name.at(name).to_vector<float>(), tensor.to_vector<float>());
  }
}

TEST(Checkpoint, Gpt2OfTransformersGivesItsLogitsAndGoesBack) {
  const NoGrad scope;
  Gpt2 model = load_gpt2(recorded("gpt2"));
  const auto [ids, logits] = expected("gpt2");
  expect_near(model(ids), logits);

  const TemporaryFolder folder;
  save_gpt2(folder / "gpt2", model);
  const io::Checkpoint saved = io::load(folder / "gpt2");
  EXPECT_EQ(saved.metadata, (io::Metadata{{"format", "pt"}}));
  expect_holds(saved.tensors, io::load(recorded("gpt2")).tensors);
  Gpt2 again = load_gpt2(folder / "gpt2");
  EXPECT_EQ(again(ids).to_vector<float>(), model(ids).to_vector<float>());
}

TEST(Checkpoint, ShardedBertOfTransformersGivesItsLogitsAndGoesBack) {
  const NoGrad scope;
  BertForMaskedLM model = load_bert(recorded("bert"));
  const auto [ids, logits] = expected("bert");
  expect_near(model(BertInput{.input_ids = ids}), logits);

  const TemporaryFolder folder;
  save_bert(folder / "bert", model, 3000);
  EXPECT_TRUE(std::filesystem::exists(folder / "bert" / "model.safetensors.index.json"));
  expect_holds(io::load(folder / "bert").tensors, io::load(recorded("bert")).tensors);
  BertForMaskedLM again = load_bert(folder / "bert");
  EXPECT_EQ(again(BertInput{.input_ids = ids}).to_vector<float>(),
            model(BertInput{.input_ids = ids}).to_vector<float>());
}

TEST(Checkpoint, TakesNamesOfOlderVersions) {
  const NoGrad scope;
  const TemporaryFolder folder;
  const auto [ids, logits] = expected("gpt2");
  // The first GPT-2 of the hub looks like this: no prefix, and masks among the parameters.
  NamedTensors bare;
  for (const auto& [name, tensor] : io::load(recorded("gpt2")).tensors) {
    bare.emplace_back(name.substr(std::string("transformer.").size()), tensor);
  }
  bare.emplace_back("h.0.attn.bias", Tensor::empty({1, 1, 16, 16}, DType::kBool));
  std::filesystem::create_directory(folder / "gpt2");
  std::filesystem::copy(recorded("gpt2") / "config.json", folder / "gpt2" / "config.json");
  io::save(folder / "gpt2" / "model.safetensors", bare);
  expect_near(load_gpt2(folder / "gpt2")(ids), logits);

  NamedTensors old;
  for (auto [name, tensor] : io::load(recorded("bert")).tensors) {
    if (const size_t at = name.find("LayerNorm."); at != std::string::npos) {
      name = name.substr(0, at) + (name.ends_with("weight") ? "LayerNorm.gamma" : "LayerNorm.beta");
    }
    old.emplace_back(name, tensor);
  }
  old.emplace_back("bert.pooler.dense.bias", Tensor::empty({12}, DType::kF32));
  std::filesystem::create_directory(folder / "bert");
  std::filesystem::copy(recorded("bert") / "config.json", folder / "bert" / "config.json");
  io::save(folder / "bert" / "model.safetensors", old);
  const auto bert = expected("bert");
  expect_near(load_bert(folder / "bert")(BertInput{.input_ids = bert.ids}), bert.logits);
}

TEST(Checkpoint, SaysWhatDoesNotFit) {
  const TemporaryFolder folder;
  const auto error_of = [&](const std::string& config) -> std::string {
    folder.write("config.json", config);
    return message_of([&] { load_gpt2(folder.path()); });
  };
  const std::string sizes = R"("vocab_size": 5, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1)";
  EXPECT_THAT(error_of("{" + sizes + "}"), HasSubstr("has neither model.safetensors nor"));
  save_gpt2(folder.path(), Gpt2({.vocab_size = 5, .n_positions = 4, .n_embd = 4, .n_layer = 1, .n_head = 1}));
  EXPECT_EQ(error_of("{" + sizes + "}"), "");
  EXPECT_THAT(error_of("{" + sizes + R"(, "activation_function": "relu"})"),
              HasSubstr("activation_function must be \"gelu_new\""));
  EXPECT_THAT(error_of("{" + sizes + R"(, "model_type": "llama"})"), HasSubstr("model_type must be \"gpt2\""));
  EXPECT_THAT(error_of("{" + sizes + R"(, "attn_pdrop": "much"})"), HasSubstr("attn_pdrop should be a number"));
  EXPECT_THAT(error_of(R"({"vocab_size": 7, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1})"),
              HasSubstr("wte.weight"));
  EXPECT_THAT(error_of("[]"), HasSubstr("should be an object"));
}

}  // namespace
}  // namespace chorale::models
