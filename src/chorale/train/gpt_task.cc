// A small GPT learns to go on with a text.
#include <cmath>
#include <numbers>

#include "chorale/api/api.h"
#include "chorale/data/token_windows.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/tasks.h"
#include "chorale/train/text_task.h"
#include "chorale/train/writer.h"

namespace chorale::train {
namespace {

struct GptOptions : TextTaskOptions {
  std::string prompt = "\n";
  int64_t sample_tokens = 160;
};

models::Gpt2Config config_of(const GptOptions& o, int64_t vocabulary) {
  const ShapeOptions& shape = o.shape;
  if (!shape.model_config.empty()) {
    models::Gpt2Config config = models::parse_gpt2_config(shape.config_source, shape.model_config);
    check_fits(config.vocab_size, vocabulary, config.n_positions, o.text.context);
    return config;
  }
  return {.vocab_size = vocabulary,
          .n_positions = o.text.context,
          .n_embd = shape.width,
          .n_layer = shape.layers,
          .n_head = shape.heads,
          .embd_pdrop = shape.dropout,
          .resid_pdrop = shape.dropout,
          .attn_pdrop = shape.dropout};
}

class GptTask final : public TextTask<data::TokenWindows, models::Gpt2> {
 public:
  GptTask(const GptOptions& options, const TrainOptions& common)
      : TextTask(
            "GPT", options.text.context, common, read_corpus(options.text),
            [&](const auto& tokens) { return data::TokenWindows(tokens, options.text.context); },
            [&](const Tokenizer& tokenizer) {
              const models::Gpt2Config config = config_of(options, tokenizer.size());
              check_memory(models::size_of(config), common);
              check_heads(config.n_head, common);
              return models::Gpt2(config);
            }),
        options_(options),
        seed_(static_cast<uint64_t>(common.seed)) {}

  Outcome forward(const data::Example& batch) override {
    const Tensor logits = (*model_)(batch.x);
    return {cross_entropy(flatten(logits, 0, 1), flatten(batch.y))};
  }
  Metrics of_loss(double loss) const override {
    return {{"bits_per_byte", loss / std::numbers::ln2 / corpus_.bytes_per_token}};
  }
  bool has_samples() const override { return options_.sample_tokens > 0; }
  std::optional<std::string> sample(int64_t step) override {
    if (!has_samples()) return {};
    Generator numbers = Generator(seed_).fork(static_cast<uint64_t>(step));
    return write_text(shown(), corpus_.tokenizer, options_.prompt,
                      {.tokens = options_.sample_tokens, .temperature = 0.8, .top_k = 50, .generator = &numbers});
  }
  void start_from(const std::filesystem::path& folder) override {
    model_->load_state_dict(models::load_gpt2(folder, model_tensors(folder)).state_dict());
  }
  NamedTensors named_weights(const std::filesystem::path& folder) override {
    return models::gpt2_weights(model_tensors(folder));
  }
  void save_files(const std::filesystem::path& folder) const override {
    models::save_config(folder, *model_);
    corpus_.tokenizer.save(folder);
  }

 private:
  GptOptions options_;
  uint64_t seed_;
};

class GptKind final : public TaskKind {
 public:
  const char* name() const override { return "gpt"; }
  const char* help() const override { return "Learn to go on with a text, token by token"; }
  void list_options(TrainOptions& common, OptionTable& table) override {
    train::list_options(options_, "GPT-2", common, table);
    common.lr = 2e-3;
    common.schedule = "cosine";
    table.add(
        {.name = "prompt", .help = "what samples begin with", .target = &options_.prompt, .kind = OptionKind::kFree});
    table.add({.name = "sample-tokens",
               .help = "length of samples",
               .target = &options_.sample_tokens,
               .kind = OptionKind::kFree,
               .most = 1e6});
  }
  void settle(const TrainOptions& common) override {
    train::settle(options_, common);
    check_memory(models::size_of(config_of(options_, 0)), common);  // of as many tokens as there will be at least
  }
  std::unique_ptr<Task> make(const TrainOptions& common) const override {
    return std::make_unique<GptTask>(options_, common);
  }

 private:
  GptOptions options_;
};

}  // namespace

std::unique_ptr<TaskKind> gpt_kind() { return std::make_unique<GptKind>(); }

}  // namespace chorale::train
