// A small GPT learns to go on with a text.
#include <cmath>
#include <numbers>

#include "chorale/api/api.h"
#include "chorale/data/token_windows.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/corpus.h"
#include "chorale/train/tasks.h"
#include "chorale/train/text_task.h"
#include "chorale/train/writer.h"

namespace chorale::train {
namespace {

struct GptOptions {
  TextOptions text;
  ShapeOptions shape;
  std::string prompt = "\n";
  int64_t sample_tokens = 160;
};

models::Gpt2Config config_of(const GptOptions& o, int64_t vocabulary) {
  const ShapeOptions& shape = o.shape;
  if (!shape.model_config.empty()) {
    models::Gpt2Config config = models::parse_gpt2_config("--model-config", shape.model_config);
    check_fits(config.vocab_size, vocabulary, config.n_positions, o.text.context);
    return config;
  }
  check(shape);
  return {.vocab_size = vocabulary,
          .n_positions = o.text.context,
          .n_embd = shape.width,
          .n_layer = shape.layers,
          .n_head = shape.heads,
          .embd_pdrop = shape.dropout,
          .resid_pdrop = shape.dropout,
          .attn_pdrop = shape.dropout};
}

class GptTask final : public Task {
 public:
  GptTask(const GptOptions& options, uint64_t seed)
      : options_(options),
        seed_(seed),
        corpus_(read_corpus(options.text)),
        windows_(corpus_.tokens, options.text.context),
        tested_(corpus_.held_out, options.text.context),
        model_(config_of(options, corpus_.tokenizer.size())) {}

  std::string describe() const override { return "GPT: " + corpus_.description; }
  Unit unit() const override { return {"tokens", options_.text.context}; }
  std::string fingerprint() const override { return corpus_.fingerprint; }
  nn::Module& model() override { return model_; }
  int64_t examples() const override { return windows_.size(); }
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::Sampler> sampler,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<data::TokenWindows>>(windows_, std::move(sampler), options);
  }
  Outcome forward(const data::Example& batch) override {
    const Tensor logits = model_(batch.x);
    return {cross_entropy(flatten(logits, 0, 1), flatten(batch.y))};
  }
  Metrics of_loss(double loss) const override {
    return {{"bits_per_byte", loss / std::numbers::ln2 / corpus_.bytes_per_token}};
  }
  Metrics evaluate(const comm::Group& group) override {
    const int64_t size = std::min<int64_t>(tested_.size(), 16);
    data::DataLoader<data::TokenWindows> batches(tested_, {.batch_size = size, .drop_last = true});
    const double loss = mean_loss(*this, batches, group);
    return {{"test_loss", loss}, {"test_bits_per_byte", of_loss(loss)[0].second}};
  }
  std::optional<std::string> sample(int64_t step) override {
    Generator numbers = Generator(seed_).fork(static_cast<uint64_t>(step));
    return write_text(model_, corpus_.tokenizer, options_.prompt,
                      {.tokens = options_.sample_tokens, .temperature = 0.8, .top_k = 50, .generator = &numbers});
  }
  void start_from(const std::filesystem::path& folder) override {
    model_.load_state_dict(models::load_gpt2(folder).state_dict());
  }
  void save(const std::filesystem::path& folder) const override {
    models::save_gpt2(folder, model_);
    corpus_.tokenizer.save(folder);
  }

 private:
  GptOptions options_;
  uint64_t seed_;
  Corpus corpus_;
  data::TokenWindows windows_, tested_;
  models::Gpt2 model_;
};

class GptKind final : public TaskKind {
 public:
  const char* name() const override { return "gpt"; }
  const char* help() const override { return "Learn to go on with a text, token by token"; }
  void list_options(TrainOptions& common, OptionTable& table) override {
    common.epochs = 1;
    common.batch = 32;
    common.lr = 2e-3;
    common.schedule = "cosine";
    common.warmup = 50;
    common.clip = 1;
    common.evaluate_every = common.checkpoint_every = 250;
    train::list_options(options_.text, table);
    train::list_options(options_.shape, "GPT-2", table);
    table.add(
        {.name = "prompt", .help = "what samples begin with", .target = &options_.prompt, .kind = OptionKind::kFree});
    table.add({.name = "sample-tokens",
               .help = "length of samples",
               .target = &options_.sample_tokens,
               .kind = OptionKind::kFree});
  }
  void settle(const TrainOptions& common) override {
    read_model_config(options_.shape, common.init);
    if (!common.init.empty() && options_.text.tokenizer == "bytes" &&
        std::filesystem::exists(std::filesystem::path(common.init) / "vocab.json")) {
      options_.text.tokenizer = common.init;
    }
  }
  std::unique_ptr<Task> make(const TrainOptions& common) const override {
    return std::make_unique<GptTask>(options_, static_cast<uint64_t>(common.seed));
  }

 private:
  GptOptions options_;
};

}  // namespace

std::unique_ptr<TaskKind> gpt_kind() { return std::make_unique<GptKind>(); }

}  // namespace chorale::train
