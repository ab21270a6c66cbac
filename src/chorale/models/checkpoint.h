// Checkpoints of Hugging Face's libraries, both ways: a folder with config.json and model.safetensors, or its shards
// and their index. What from_pretrained loads there, these load here, and the other way round.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"

namespace chorale::models {

// Throw InvalidArgument, naming the folder, when a file is missing or damaged, when the configuration asks for
// something that the model here does not do, and when names or shapes differ. Parameters become f32, whatever the file
// has; the model is in evaluation mode. Parts that the model has not (BERT's pooler, GPT-2's stored masks) are left
// out.
Gpt2 load_gpt2(const std::filesystem::path& folder);
BertForMaskedLM load_bert(const std::filesystem::path& folder);
// The same with weights that were read already.
Gpt2 load_gpt2(const std::filesystem::path& folder, const NamedTensors& stored);
BertForMaskedLM load_bert(const std::filesystem::path& folder, const NamedTensors& stored);

// What is stored for a model, by the names that it has here; without parts that it has not.
NamedTensors gpt2_weights(const NamedTensors& stored);
NamedTensors bert_weights(const NamedTensors& stored);

// The text of a config.json; `what` names it in errors.
Gpt2Config parse_gpt2_config(const std::string& what, std::string_view text);
BertConfig parse_bert_config(const std::string& what, std::string_view text);

// Parameters are saved in their own dtypes, shared ones once. The folder is made if need be.
inline constexpr size_t kShardBytes = 5'000'000'000;
void save_gpt2(const std::filesystem::path& folder, const Gpt2& model, size_t max_shard_bytes = kShardBytes);
void save_bert(const std::filesystem::path& folder, const BertForMaskedLM& model, size_t max_shard_bytes = kShardBytes);
// config.json alone, into a folder that is there.
void save_config(const std::filesystem::path& folder, const Gpt2& model);
void save_config(const std::filesystem::path& folder, const BertForMaskedLM& model);

}  // namespace chorale::models
