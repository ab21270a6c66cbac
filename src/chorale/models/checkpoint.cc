#include "chorale/models/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "chorale/io/safetensors.h"
#include "chorale/io/sharded.h"
#include "chorale/json/json.h"
#include "chorale/models/size.h"

namespace chorale::models {
namespace {

// The fields of a configuration by their names in config.json: reading and writing go through this one list.
template <class F>
void for_each_field(Gpt2Config& c, F&& f) {
  f("vocab_size", c.vocab_size);
  f("n_positions", c.n_positions);
  f("n_embd", c.n_embd);
  f("n_layer", c.n_layer);
  f("n_head", c.n_head);
  f("layer_norm_epsilon", c.layer_norm_epsilon);
  f("embd_pdrop", c.embd_pdrop);
  f("resid_pdrop", c.resid_pdrop);
  f("attn_pdrop", c.attn_pdrop);
  f("initializer_range", c.initializer_range);
}
template <class F>
void for_each_field(BertConfig& c, F&& f) {
  f("vocab_size", c.vocab_size);
  f("hidden_size", c.hidden_size);
  f("num_hidden_layers", c.num_hidden_layers);
  f("num_attention_heads", c.num_attention_heads);
  f("intermediate_size", c.intermediate_size);
  f("max_position_embeddings", c.max_position_embeddings);
  f("type_vocab_size", c.type_vocab_size);
  f("pad_token_id", c.pad_token_id);
  f("hidden_dropout_prob", c.hidden_dropout_prob);
  f("attention_probs_dropout_prob", c.attention_probs_dropout_prob);
  f("layer_norm_eps", c.layer_norm_eps);
  f("initializer_range", c.initializer_range);
}

// Settings that our models have no choice about: absent, or this.
struct Fixed {
  const char* key;
  json::Value::Data value;
};
const std::vector<Fixed>& fixed_settings(const Gpt2Config&) {
  static const std::vector<Fixed> rows = {{"model_type", std::string("gpt2")},
                                          {"activation_function", std::string("gelu_new")},
                                          {"n_inner", nullptr},
                                          {"scale_attn_weights", true},
                                          {"scale_attn_by_inverse_layer_idx", false},
                                          {"add_cross_attention", false},
                                          {"tie_word_embeddings", true}};
  return rows;
}
const std::vector<Fixed>& fixed_settings(const BertConfig&) {
  static const std::vector<Fixed> rows = {{"model_type", std::string("bert")},
                                          {"hidden_act", std::string("gelu")},
                                          {"position_embedding_type", std::string("absolute")},
                                          {"add_cross_attention", false},
                                          {"is_decoder", false},
                                          {"tie_word_embeddings", true}};
  return rows;
}

bool is(const json::Value& value, const json::Value::Data& expected) {
  if (const auto* text = std::get_if<std::string>(&expected))
    return value.as<std::string>() && *value.as<std::string>() == *text;
  if (const auto* flag = std::get_if<bool>(&expected)) return value.as<bool>() && *value.as<bool>() == *flag;
  return value.as<std::nullptr_t>() != nullptr;
}
std::string text_of(const json::Value::Data& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return json::quote(*text);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return "null";
}
// The shortest text that reads back as the same number.
std::string text_of(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, std::end(buffer), value).ptr};
}

template <class Config>
Config parse_config(const std::string& path, std::string_view text) {
  const json::Value root = json::parse(path, text, {.bytes = 1'000'000});
  const json::Object& object = root.object(path);
  Config config;
  for (const Fixed& row : fixed_settings(config)) {
    const json::Value* value = json::find(object, row.key);
    CHORALE_CHECK(!value || is(*value, row.value), "[load] ", path, ": ", row.key, " must be ", text_of(row.value),
                  ", the only value that the model here knows");
  }
  for_each_field(config, [&](const char* name, auto& field) {
    const json::Value* value = json::find(object, name);
    if (!value) return;  // the default, which is the same there
    if constexpr (std::is_integral_v<std::remove_reference_t<decltype(field)>>) {
      if (std::string_view(name) == "pad_token_id" && value->as<std::nullptr_t>()) return;
      field = value->size(concat(path, ": ", name));
      CHORALE_CHECK(field < (int64_t{1} << 31), "[load] ", path, ": ", name, " is ", field, "; that is too large");
    } else {
      const auto* real = value->as<double>();
      const auto* whole = value->as<int64_t>();
      CHORALE_CHECK(real || whole, "[load] ", path, ": ", name, " should be a number, but is ", value->kind());
      field = real ? *real : static_cast<double>(*whole);
    }
  });
  return config;
}

template <class Config>
Config read_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  return parse_config<Config>(path.string(), io::MappedFile::open(path)->text());
}

template <class Config>
void write_config(const std::filesystem::path& folder, Config config, const char* architecture) {
  std::string text = "{\n  \"architectures\": [\"" + std::string(architecture) + "\"]";
  const auto add = [&](const char* name, const std::string& value) {
    text += ",\n  " + json::quote(name) + ": " + value;
  };
  for (const Fixed& row : fixed_settings(config)) add(row.key, text_of(row.value));
  for_each_field(config, [&](const char* name, auto& field) {
    if constexpr (std::is_integral_v<std::remove_reference_t<decltype(field)>>) {
      add(name, std::to_string(field));
    } else {
      add(name, text_of(field));
    }
  });
  text += "\n}\n";
  io::write_file(folder / "config.json", text);
}

template <class Model>
void save(const std::filesystem::path& folder, const Model& model, size_t max_shard_bytes) {
  NamedTensors tensors;
  std::set<const void*> seen;
  for (auto& [name, tensor] : model.state_dict()) {
    if (tensor.elems() == 0 || seen.insert(tensor.raw()).second) tensors.emplace_back(name, tensor);
  }
  // Without this note the libraries there refuse the file.
  io::save_sharded(folder, tensors, max_shard_bytes, {{"format", "pt"}});
  save_config(folder, model);
}

bool has_prefix(const NamedTensors& tensors, std::string_view prefix) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& row) { return row.first.starts_with(prefix); });
}

template <class Model>
void load_parameters(Model& model, const NamedTensors& tensors, const std::filesystem::path& folder) {
  try {
    model.load_state_dict(tensors);
  } catch (const InvalidArgument& error) {
    detail::raise<InvalidArgument>(error.what(), " (from ", folder, ")");
  }
  model.eval();
}

// What a configuration asks for is compared with the weights before memory is taken for it. Only a model that is far
// too large is refused here: where one layer differs, the error that names the layer says more.
template <class Config>
void check_size(const Config& config, const NamedTensors& stored, const std::filesystem::path& folder) {
  double numbers = 0;
  for (const auto& [name, tensor] : stored) numbers += static_cast<double>(tensor.elems());
  const double expected = size_of(config).parameters;
  CHORALE_CHECK(expected <= 2 * numbers, "[load] ", folder, ": config.json describes a model of ", expected,
                " parameters, but the weights are only ", numbers, " numbers: they do not belong together");
}

}  // namespace

Gpt2Config parse_gpt2_config(const std::string& what, std::string_view text) {
  return parse_config<Gpt2Config>(what, text);
}
BertConfig parse_bert_config(const std::string& what, std::string_view text) {
  return parse_config<BertConfig>(what, text);
}

Gpt2 load_gpt2(const std::filesystem::path& folder) { return load_gpt2(folder, io::load(folder).tensors); }
BertForMaskedLM load_bert(const std::filesystem::path& folder) { return load_bert(folder, io::load(folder).tensors); }

Gpt2 load_gpt2(const std::filesystem::path& folder, const NamedTensors& stored) {
  const auto config = read_config<Gpt2Config>(folder);
  check_size(config, stored, folder);
  Gpt2 model(config);
  load_parameters(model, gpt2_weights(stored), folder);
  return model;
}

NamedTensors gpt2_weights(const NamedTensors& stored) {
  const bool bare = !has_prefix(stored, "transformer.");  // saved without its head
  NamedTensors tensors;
  tensors.reserve(stored.size());
  for (const auto& [name, tensor] : stored) {
    if (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")) continue;  // masks, of older versions
    tensors.emplace_back(bare && !name.starts_with("lm_head.") ? "transformer." + name : name, tensor);
  }
  return tensors;
}

BertForMaskedLM load_bert(const std::filesystem::path& folder, const NamedTensors& all) {
  const auto config = read_config<BertConfig>(folder);
  check_size(config, all, folder);
  BertForMaskedLM model(config);
  load_parameters(model, bert_weights(all), folder);
  return model;
}

NamedTensors bert_weights(const NamedTensors& all) {
  NamedTensors tensors;
  tensors.reserve(all.size());
  for (const auto& [stored, tensor] : all) {
    std::string name = stored;
    if (name.starts_with("bert.pooler.") || name.starts_with("cls.seq_relationship.") ||
        name == "bert.embeddings.position_ids") {
      continue;  // of other heads, and a buffer of older versions
    }
    // What TensorFlow's checkpoints called them.
    if (name.ends_with("LayerNorm.gamma")) name.replace(name.size() - 5, 5, "weight");
    if (name.ends_with("LayerNorm.beta")) name.replace(name.size() - 4, 4, "bias");
    tensors.emplace_back(std::move(name), tensor);
  }
  return tensors;
}

void save_gpt2(const std::filesystem::path& folder, const Gpt2& model, size_t max_shard_bytes) {
  save(folder, model, max_shard_bytes);
}

void save_bert(const std::filesystem::path& folder, const BertForMaskedLM& model, size_t max_shard_bytes) {
  save(folder, model, max_shard_bytes);
}

void save_config(const std::filesystem::path& folder, const Gpt2& model) {
  write_config(folder, model.config, "GPT2LMHeadModel");
}

void save_config(const std::filesystem::path& folder, const BertForMaskedLM& model) {
  write_config(folder, model.config, "BertForMaskedLM");
}

}  // namespace chorale::models
