// What a training job is made of, as the trainer sees it: a model, examples, a loss, and a measure of success.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/data/loader.h"
#include "chorale/nn/module.h"
#include "chorale/nn/visit_tensors.h"
#include "chorale/train/options.h"

namespace chorale::train {

using Loader = data::LoaderBase<data::Example>;
// Numbers by name, in the order in which they are shown: "loss", "test_accuracy" (from 0 to 1), ….
using Metrics = std::vector<std::pair<std::string, double>>;

// What the model makes of a batch.
struct Outcome {
  Tensor loss;     // mean over the batch
  Tensor right{};  // i64: how many examples were told right; undefined where there is no right and wrong
  CHORALE_TENSORS(Outcome, loss, right)
};

class Task {
 public:
  virtual ~Task() = default;

  // One line: what it learns from.
  virtual std::string describe() const = 0;
  // What examples are counted in, and how many of these one has: {"pictures", 1}, {"tokens", 256}.
  struct Unit {
    const char* name;
    int64_t per_example;
  };
  virtual Unit unit() const = 0;
  // A text that differs when the data do, so that a run does not go on with other data.
  virtual std::string fingerprint() const = 0;

  virtual nn::Module& model() = 0;
  // Moves the model to a device, unless it has no memory yet: then it computes there when it has some. Examples are
  // made on the CPU: here() brings them to the model.
  void place(Device device);
  Device device() const { return device_; }
  data::Example here(const data::Example& batch) const;
  // Training examples in an epoch.
  virtual int64_t examples() const = 0;
  virtual std::shared_ptr<Loader> loader(std::shared_ptr<const data::BatchSampler> batches,
                                         const data::LoaderOptions& options) const = 0;
  virtual Outcome forward(const data::Example& batch) = 0;

  // What a loss means besides itself: bits per byte.
  virtual Metrics of_loss(double) const { return {}; }
  // How well the model does on data that it is not trained on; the last number is the result of the job. All ranks call
  // it and share the work; the model is in evaluation mode and nothing is recorded.
  virtual Metrics evaluate(const comm::Group& group) = 0;
  // Called on rank 0 after evaluate(): may leave files about it in the folder of the run.
  virtual void report(const std::filesystem::path& /*run*/) const {}
  // Something that the model made, to look at; called on one rank, in evaluation mode.
  virtual std::optional<std::string> sample(int64_t /*step*/) { return {}; }
  // Whether there will be one: ranks that have parts of the model put it together for that.
  virtual bool has_samples() const { return false; }

  // Where ranks have parts of the model: until this is called with null, sample() uses a whole model with these
  // parameters and buffers.
  virtual void show_whole(const NamedTensors* state);

  // Writes what is needed to use the model elsewhere besides its weights (config.json, a tokenizer) into a folder,
  // which exists.
  virtual void save_files(const std::filesystem::path& /*folder*/) const {}
  // Takes over weights to start from, of a checkpoint or of another program.
  virtual void start_from(const std::filesystem::path& folder);
  // The same for a model of which ranks have parts: its weights by the names that the model has for them, each once.
  NamedTensors weights_from(const std::filesystem::path& folder);
  // Fills a model that was made without memory, and has some now, with what a whole one would have begun with.
  virtual void draw_model();
  // From now on model() is another one without memory, for ranks that share it in another way. Returns the one of
  // before, which nobody else keeps.
  virtual std::shared_ptr<nn::Module> renew_model();

 protected:
  // Weights as they are stored, by our names.
  virtual NamedTensors named_weights(const std::filesystem::path& folder);

 private:
  Device device_ = kCpu;
};

// A kind of job: its name, its own options, and how its task is made.
class TaskKind {
 public:
  virtual ~TaskKind() = default;
  virtual const char* name() const = 0;
  virtual const char* help() const = 0;
  // Sets its own defaults of common options, and adds its own options.
  virtual void list_options(TrainOptions& common, OptionTable& table) = 0;
  // Called when all options have their values: replaces names of files that describe the model by what they say, so
  // that a run can go on without them.
  virtual void settle(const TrainOptions& /*common*/) {}
  // The model's weights are drawn from the process's generator.
  virtual std::unique_ptr<Task> make(const TrainOptions& common) const = 0;
};

// "loss 0.312  accuracy 88.20 %".
std::string text_of(const Metrics& metrics);

}  // namespace chorale::train
