// A BERT learns to guess tokens that are hidden from it.
#include "chorale/api/api.h"
#include "chorale/data/token_windows.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/tasks.h"
#include "chorale/train/text_task.h"

namespace chorale::train {
namespace {

constexpr int64_t kIgnored = -100;  // of cross_entropy
constexpr const char *kPad = "[PAD]", *kBegin = "[CLS]", *kEnd = "[SEP]", *kMask = "[MASK]";

struct BertOptions : TextTaskOptions {
  double masked = 0.15;  // share of tokens to be guessed
};

models::BertConfig config_of(const BertOptions& o, int64_t vocabulary, int64_t pad) {
  const ShapeOptions& shape = o.shape;
  if (!shape.model_config.empty()) {
    models::BertConfig config = models::parse_bert_config(shape.config_source, shape.model_config);
    check_fits(config.vocab_size, vocabulary, config.max_position_embeddings, o.text.context);
    return config;
  }
  return {.vocab_size = vocabulary,
          .hidden_size = shape.width,
          .num_hidden_layers = shape.layers,
          .num_attention_heads = shape.heads,
          .intermediate_size = 4 * shape.width,
          .max_position_embeddings = o.text.context,
          .pad_token_id = pad,
          .hidden_dropout_prob = shape.dropout,
          .attention_probs_dropout_prob = shape.dropout};
}

// A window of tokens between [CLS] and [SEP], some of which are to be guessed: of those, 80 % are hidden behind the
// mask, 10 % are replaced by any token, 10 % stay. Labels of the others are ignored.
class Masking {
 public:
  Masking(double share, const Tokenizer& tokenizer)
      : share_(share),
        begin_(tokenizer.special(kBegin)),
        end_(tokenizer.special(kEnd)),
        mask_(tokenizer.special(kMask)),
        tokens_(tokenizer.size()) {}

  data::Example operator()(const data::Example& window, Generator& rng) const {
    std::vector<int64_t> ids = window.x.to_vector<int64_t>();
    const auto count = static_cast<int64_t>(ids.size());
    std::vector<int64_t> labels(ids.size(), kIgnored);
    const std::vector<float> draws = uniform({count, 2}, 0, 1, DType::kF32, rng).to_vector<float>();
    for (size_t i = 0; i < ids.size(); ++i) {
      if (draws[2 * i] >= share_) continue;
      labels[i] = ids[i];
      const double how = draws[2 * i + 1];
      if (how < 0.8) {
        ids[i] = mask_;
      } else if (how < 0.9) {
        ids[i] = std::min(static_cast<int64_t>((how - 0.8) * 10 * static_cast<double>(tokens_)), tokens_ - 1);
      }
    }
    for (auto* list : {&ids, &labels}) {
      list->insert(list->begin(), list == &ids ? begin_ : kIgnored);
      list->push_back(list == &ids ? end_ : kIgnored);
    }
    return {Tensor::from(ids, {count + 2}), Tensor::from(labels, {count + 2})};
  }

 private:
  double share_;
  int64_t begin_, end_, mask_, tokens_;
};
using MaskedWindows = data::Mapped<data::TokenWindows, Masking>;

Corpus read_bert_corpus(const BertOptions& options) {
  CHORALE_CHECK(options.text.context >= 4, "[train] a --context of ", options.text.context,
                " is too small: [CLS] and [SEP] stand in it as well; choose at least 4");
  return read_corpus(options.text, {kPad, kBegin, kEnd, kMask});
}

class BertTask final : public TextTask<MaskedWindows, models::BertForMaskedLM> {
 public:
  BertTask(const BertOptions& options, const TrainOptions& common)
      : BertTask(options, common, read_bert_corpus(options)) {}

  Outcome forward(const data::Example& batch) override {
    const Tensor logits = (*model_)(models::BertInput{batch.x});
    return {cross_entropy(flatten(logits, 0, 1), flatten(batch.y), {}, Reduction::kMean, kIgnored)};
  }
  bool has_samples() const override { return true; }
  std::optional<std::string> sample(int64_t step) override;
  void start_from(const std::filesystem::path& folder) override {
    model_->load_state_dict(models::load_bert(folder, model_tensors(folder)).state_dict());
  }
  NamedTensors named_weights(const std::filesystem::path& folder) override {
    return models::bert_weights(model_tensors(folder));
  }
  void save_files(const std::filesystem::path& folder) const override {
    models::save_config(folder, *model_);
    corpus_.tokenizer.save(folder);
  }

 private:
  BertTask(const BertOptions& options, const TrainOptions& common, const Corpus& corpus)
      : TextTask(
            "BERT", options.text.context, common, corpus,
            [&](const auto& tokens) {
              return MaskedWindows(data::TokenWindows(tokens, options.text.context - 2),
                                   Masking(options.masked, corpus.tokenizer));
            },
            [&](const Tokenizer& tokenizer) {
              const models::BertConfig config = config_of(options, tokenizer.size(), tokenizer.special(kPad));
              check_memory(models::size_of(config), common);
              check_heads(config.num_attention_heads, common);
              return models::BertForMaskedLM(config);
            }) {}
};

// A window of the text that is kept aside, with what the model guesses: "And God [said], Let there be [day: light]".
std::optional<std::string> BertTask::sample(int64_t step) {
  Generator rng(static_cast<uint64_t>(step));
  const data::Example window = tested_.get(step % tested_.size(), rng);
  const std::vector<int64_t> labels = window.y.to_vector<int64_t>(), ids = window.x.to_vector<int64_t>();
  const Tensor logits = shown()(models::BertInput{to(unsqueeze(window.x, 0), device())});
  const std::vector<int64_t> guesses = argmax(select(logits, 0, 0), 1).to_vector<int64_t>();
  const auto text_of = [&](std::span<const int32_t> tokens) {
    const std::string text = as_utf8(corpus_.tokenizer.decode(tokens));
    const size_t begin = std::min(text.find_first_not_of(' '), text.size());
    return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
  };
  std::string text;
  std::vector<int32_t> seen;  // since the last guess
  const auto add = [&](const std::string& part) {
    if (!part.empty()) text += (text.empty() ? "" : " ") + part;
  };
  for (size_t i = 1; i + 1 < ids.size(); ++i) {
    if (labels[i] == kIgnored) {
      seen.push_back(static_cast<int32_t>(ids[i]));
      continue;
    }
    add(text_of(seen));
    seen.clear();
    const auto guess = static_cast<int32_t>(guesses[i]), truth = static_cast<int32_t>(labels[i]);
    add(concat("[", text_of({&guess, 1}), guess == truth ? "" : ": " + text_of({&truth, 1}), "]"));
  }
  add(text_of(seen));
  return text;
}

class BertKind final : public TaskKind {
 public:
  const char* name() const override { return "bert"; }
  const char* help() const override { return "Learn to guess the tokens of a text that are hidden"; }
  void list_options(TrainOptions& common, OptionTable& table) override {
    options_.shape.dropout = 0.1;
    train::list_options(options_, "BERT", common, table);
    common.epochs = 6;  // only some of the tokens are guessed each time
    common.lr = 1e-3;
    common.schedule = "linear";
    table.add({.name = "masked",
               .help = "share of tokens to be guessed",
               .target = &options_.masked,
               .least = 0.01,
               .most = 1});
  }
  void settle(const TrainOptions& common) override {
    train::settle(options_, common);
    check_memory(models::size_of(config_of(options_, 0, 0)), common);  // of as many tokens as there will be at least
  }
  std::unique_ptr<Task> make(const TrainOptions& common) const override {
    return std::make_unique<BertTask>(options_, common);
  }

 private:
  BertOptions options_;
};

}  // namespace

std::unique_ptr<TaskKind> bert_kind() { return std::make_unique<BertKind>(); }

}  // namespace chorale::train
