// What tasks on text have in common.
#pragma once

#include <algorithm>

#include "chorale/base/generator.h"
#include "chorale/models/size.h"
#include "chorale/nn/fp8.h"
#include "chorale/op/device_scope.h"
#include "chorale/train/corpus.h"
#include "chorale/train/task.h"

namespace chorale::train {

// The shape of a transformer.
struct ShapeOptions {
  int64_t layers = 4, heads = 4, width = 128;
  double dropout = 0;
  std::string model_config{};  // a file's name, and after settle() its content: then that counts instead
  std::string config_source = "--model-config";  // what errors call it: after settle() the file, if there was one
};

struct TextTaskOptions {
  TextOptions text;
  ShapeOptions shape;
};
// Adds the options, and sets the defaults of common ones. `model` is whose config.json can be given, such as "GPT-2".
void list_options(TextTaskOptions& options, const char* model, TrainOptions& common, OptionTable& table);
// Replaces the name of a config.json by its content, that of the model to start from if no other is named, and chooses
// the tokenizer. InvalidArgument when a file is not there or larger than memory, or when the width cannot be dealt to
// the heads.
void settle(TextTaskOptions& options, const TrainOptions& common);

// InvalidArgument when this machine has not the memory to train a model of this size: before its first tensor is made.
void check_memory(const models::ModelSize& size, const TrainOptions& common);

// InvalidArgument when the heads of attention cannot be dealt to the ranks that share a model.
void check_heads(int64_t heads, const TrainOptions& common);

// InvalidArgument when a model of a config.json has too few tokens for the tokenizer, or sees too few at once.
void check_fits(int64_t model_vocabulary, int64_t tokenizer_vocabulary, int64_t model_context, int64_t context);

// The mean loss of a task's model over examples from a loader, of which each rank takes every size-th batch. All
// batches are equally large.
double mean_loss(Task& task, Loader& batches, const comm::Group& group);

// A model that learns from windows of a text; Windows is a data set.
template <class Windows, class Model>
class TextTask : public Task {
 public:
  std::string describe() const override { return concat(name_, ": ", corpus_.description); }
  Unit unit() const override { return {"tokens", context_}; }
  std::string fingerprint() const override { return corpus_.fingerprint; }
  nn::Module& model() override { return *model_; }
  int64_t examples() const override { return windows_.size(); }
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::BatchSampler> batches,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<Windows>>(windows_, std::move(batches), options);
  }
  Metrics evaluate(const comm::Group& group) override {
    const int64_t size = std::min<int64_t>(tested_.size(), 16);
    data::DataLoader<Windows> batches(tested_, {.batch_size = size, .drop_last = true});
    const double loss = mean_loss(*this, batches, group);
    Metrics metrics{{"test_loss", loss}};
    for (const auto& [name, value] : of_loss(loss)) metrics.emplace_back("test_" + name, value);
    return metrics;
  }
  void draw_model() override {
    const RandomStream random = default_generator().state();
    default_generator().restore(drawn_from_);
    model_->reset_parameters();
    default_generator().restore(random);
  }
  std::shared_ptr<nn::Module> renew_model() override {
    const RandomStream random = default_generator().state();
    const DeviceScope nowhere(kNull);
    std::shared_ptr<Model> before = std::exchange(model_, switched(std::make_shared<Model>(model_->config)));
    default_generator().restore(random);
    return before;
  }
  void show_whole(const NamedTensors* state) override {
    whole_.reset();
    if (!state) return;
    // What its first weights are drawn from goes on as if there had been none: ranks of a model draw alike.
    const RandomStream random = default_generator().state();
    whole_.emplace(model_->config);
    default_generator().restore(random);
    whole_->to(device());
    whole_->load_state_dict(*state);
    whole_->train(model_->is_training());
  }

 protected:
  // windows_of(tokens) is the data set of some tokens, and model_of(tokenizer) the model. One that is fully sharded is
  // made without memory: draw_model() fills it.
  template <class WindowsOf, class ModelOf>
  TextTask(const char* name, int64_t context, const TrainOptions& common, Corpus corpus, const WindowsOf& windows_of,
           const ModelOf& model_of)
      : corpus_(std::move(corpus)),
        windows_(windows_of(corpus_.tokens)),
        tested_(windows_of(corpus_.held_out)),
        drawn_from_(default_generator().state()),
        fp8_(common.fp8),
        model_(make_model(common, model_of)),
        name_(name),
        context_(context) {}

  // What is shown: the model, or the whole of which it has a part.
  Model& shown() { return whole_ ? *whole_ : *model_; }

  Corpus corpus_;
  Windows windows_, tested_;
  RandomStream drawn_from_;  // by the model's constructor
  bool fp8_;
  std::shared_ptr<Model> model_;
  std::optional<Model> whole_;

 private:
  template <class ModelOf>
  std::shared_ptr<Model> make_model(const TrainOptions& common, const ModelOf& model_of) {
    const DeviceScope place(common.fsdp ? kNull : kCpu);
    return switched(std::make_shared<Model>(model_of(corpus_.tokenizer)));
  }
  std::shared_ptr<Model> switched(std::shared_ptr<Model> model) const {
    if (fp8_) nn::use_fp8(*model);
    return model;
  }

  const char* name_;
  int64_t context_;
};

}  // namespace chorale::train
