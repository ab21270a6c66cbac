// A BERT learns to guess tokens that are hidden from it.
#include <cmath>
#include <numbers>

#include "chorale/api/api.h"
#include "chorale/data/token_windows.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/corpus.h"
#include "chorale/train/tasks.h"
#include "chorale/train/text_task.h"

namespace chorale::train {
namespace {

constexpr int64_t kIgnored = -100;  // of cross_entropy
constexpr const char *kPad = "[PAD]", *kMask = "[MASK]";

struct BertOptions {
  TextOptions text;
  ShapeOptions shape{.dropout = 0.1};
  double masked = 0.15;  // share of tokens to be guessed
};

models::BertConfig config_of(const BertOptions& o, const Tokenizer& tokenizer) {
  const ShapeOptions& shape = o.shape;
  if (!shape.model_config.empty()) {
    models::BertConfig config = models::parse_bert_config("--model-config", shape.model_config);
    check_fits(config.vocab_size, tokenizer.size(), config.max_position_embeddings, o.text.context);
    return config;
  }
  check(shape);
  return {.vocab_size = tokenizer.size(),
          .hidden_size = shape.width,
          .num_hidden_layers = shape.layers,
          .num_attention_heads = shape.heads,
          .intermediate_size = 4 * shape.width,
          .max_position_embeddings = o.text.context,
          .pad_token_id = tokenizer.special(kPad),
          .hidden_dropout_prob = shape.dropout,
          .attention_probs_dropout_prob = shape.dropout};
}

// A window of tokens of which some are to be guessed: of those, 80 % are hidden behind the mask, 10 % are replaced by
// any token, 10 % stay. Labels of the others are ignored.
struct Masking {
  double share;
  int64_t mask, tokens;  // the mask's id; ids below `tokens` are those of text

  data::Example operator()(const data::Example& window, Generator& rng) const {
    const int64_t count = window.x.elems();
    std::vector<int64_t> ids = window.x.to_vector<int64_t>(), labels(static_cast<size_t>(count), kIgnored);
    const std::vector<float> draws = uniform({count, 2}, 0, 1, DType::kF32, rng).to_vector<float>();
    for (size_t i = 0; i < ids.size(); ++i) {
      if (draws[2 * i] >= share) continue;
      labels[i] = ids[i];
      const double how = draws[2 * i + 1];
      if (how < 0.8) {
        ids[i] = mask;
      } else if (how < 0.9) {
        ids[i] = std::min(static_cast<int64_t>((how - 0.8) * 10 * static_cast<double>(tokens)), tokens - 1);
      }
    }
    return {Tensor::from(ids, {count}), Tensor::from(labels, {count})};
  }
};
using MaskedWindows = data::Mapped<data::TokenWindows, Masking>;

class BertTask final : public Task {
 public:
  explicit BertTask(const BertOptions& options)
      : options_(options),
        corpus_(read_corpus(options.text, {kPad, kMask})),
        masking_{options.masked, corpus_.tokenizer.special(kMask), corpus_.tokenizer.special(kPad)},
        windows_(data::TokenWindows(corpus_.tokens, options.text.context), masking_),
        tested_(data::TokenWindows(corpus_.held_out, options.text.context), masking_),
        model_(config_of(options, corpus_.tokenizer)) {}

  std::string describe() const override { return "BERT: " + corpus_.description; }
  Unit unit() const override { return {"tokens", options_.text.context}; }
  std::string fingerprint() const override { return corpus_.fingerprint; }
  nn::Module& model() override { return model_; }
  int64_t examples() const override { return windows_.size(); }
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::Sampler> sampler,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<MaskedWindows>>(windows_, std::move(sampler), options);
  }
  Outcome forward(const data::Example& batch) override {
    const Tensor logits = model_(models::BertInput{batch.x});
    return {cross_entropy(flatten(logits, 0, 1), flatten(batch.y), {}, Reduction::kMean, kIgnored)};
  }
  Metrics evaluate(const comm::Group& group) override {
    const int64_t size = std::min<int64_t>(tested_.size(), 16);
    data::DataLoader<MaskedWindows> batches(tested_, {.batch_size = size, .drop_last = true});
    return {{"test_loss", mean_loss(*this, batches, group)}};
  }
  void start_from(const std::filesystem::path& folder) override {
    model_.load_state_dict(models::load_bert(folder).state_dict());
  }
  void save(const std::filesystem::path& folder) const override {
    models::save_bert(folder, model_);
    corpus_.tokenizer.save(folder);
  }

 private:
  BertOptions options_;
  Corpus corpus_;
  Masking masking_;
  MaskedWindows windows_, tested_;
  models::BertForMaskedLM model_;
};

class BertKind final : public TaskKind {
 public:
  const char* name() const override { return "bert"; }
  const char* help() const override { return "Learn to guess the tokens of a text that are hidden"; }
  void list_options(TrainOptions& common, OptionTable& table) override {
    common.epochs = 1;
    common.batch = 32;
    common.lr = 1e-3;
    common.schedule = "linear";
    common.warmup = 50;
    common.clip = 1;
    common.evaluate_every = common.checkpoint_every = 250;
    options_.text.tokenizer = "bpe";
    train::list_options(options_.text, table);
    train::list_options(options_.shape, "BERT", table);
    table.add({.name = "masked",
               .help = "share of tokens to be guessed",
               .target = &options_.masked,
               .least = 0.01,
               .most = 1});
  }
  void settle(const TrainOptions& common) override { read_model_config(options_.shape, common.init); }
  std::unique_ptr<Task> make(const TrainOptions&) const override { return std::make_unique<BertTask>(options_); }

 private:
  BertOptions options_;
};

}  // namespace

std::unique_ptr<TaskKind> bert_kind() { return std::make_unique<BertKind>(); }

}  // namespace chorale::train
