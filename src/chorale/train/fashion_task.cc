// Fashion-MNIST: ten kinds of clothes.
#include "chorale/train/tasks.h"

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/comm/objects.h"
#include "chorale/data/fashion_mnist.h"
#include "chorale/io/safetensors.h"
#include "chorale/models/cnn.h"
#include "chorale/models/resnet.h"
#include "chorale/nn/nn.h"
#include "chorale/report/evaluation.h"
#include "chorale/train/progress.h"

namespace chorale::train {
namespace {

using data::FashionMnist;

// A residual network for colour pictures sees grey ones in three equal colours.
class GreyResNet final : public nn::Module {
 public:
  CHORALE_MODULE(GreyResNet, nn::named("resnet", resnet_))
  Tensor forward(const Tensor& x) { return resnet_(expand(x, {x.size(0), 3, x.size(2), x.size(3)})); }

 private:
  models::ResNet resnet_ = models::resnet18(10);
};

nn::Sequential make_model(const std::string& name) {
  if (name == "cnn") return models::fashion_cnn();
  if (name == "resnet18") return nn::Sequential(GreyResNet());
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 256), nn::ReLU(),
                        nn::Linear(256, 10));
}

using Mistakes = std::vector<report::Mistake>;

constexpr size_t kShown = 24;
// The mistakes that the model was surest of, on rank 0; elsewhere none.
Mistakes worst_of_all_ranks(const comm::Group& group, Mistakes mistakes) {
  const auto keep_worst = [](Mistakes& all) {
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.probability > b.probability; });
    all.resize(std::min(all.size(), kShown));
  };
  keep_worst(mistakes);
  comm::List rows;
  for (const report::Mistake& m : mistakes) {
    rows.emplace_back(comm::List{m.index, m.label, m.guess, m.probability});
  }
  Mistakes all;
  for (const comm::Value& list : comm::gather_object(group, rows)) {
    for (const comm::Value& row : list.as<comm::List>()) {
      const auto& fields = row.as<comm::List>();
      all.push_back(
          {fields[0].as<int64_t>(), fields[1].as<int64_t>(), fields[2].as<int64_t>(), fields[3].as<double>(), {}});
    }
  }
  keep_worst(all);
  return all;
}

class FashionTask final : public Task {
 public:
  explicit FashionTask(const std::string& model) : name_(model), model_(make_model(model)) {}

  std::string describe() const override {
    return concat("Fashion-MNIST: ", grouped(pictures_.size()), " pictures to learn from, ", grouped(unseen_.size()),
                  " to be tested with; model: ", name_);
  }
  Unit unit() const override { return {"pictures", 1}; }
  std::string fingerprint() const override { return concat("fashion-mnist, ", pictures_.size(), " pictures"); }
  nn::Module& model() override { return model_; }
  int64_t examples() const override { return pictures_.size(); }
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::BatchSampler> batches,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<FashionMnist>>(pictures_, std::move(batches), options);
  }
  Outcome forward(const data::Example& batch) override {
    const Tensor logits = model_(batch.x);
    const Tensor right = [&] {
      const NoGrad scope;
      return sum(eq(argmax(logits, 1), batch.y));
    }();
    return {cross_entropy(logits, batch.y), right};
  }
  Metrics evaluate(const comm::Group& group) override;
  void report(const std::filesystem::path& run) const override { report::write_evaluation(run, evaluation_); }

 private:
  std::string name_;
  FashionMnist pictures_{FashionMnist::Split::kTrain}, unseen_{FashionMnist::Split::kTest};
  nn::Sequential model_;
  report::Evaluation evaluation_;  // the last one; whole on rank 0
};

// Each rank looks at some of the pictures.
Metrics FashionTask::evaluate(const comm::Group& group) {
  constexpr size_t kClasses = FashionMnist::kClasses.size();
  double loss = 0;
  std::vector<int64_t> confusion(kClasses * kClasses), indices;
  Mistakes mistakes;
  for (int64_t i = group.rank(); i < unseen_.size(); i += group.size()) {
    indices.push_back(i);
    if (indices.size() < 500 && i + group.size() < unseen_.size()) continue;
    const data::Example batch = here(unseen_.get_batch(indices));
    const Tensor logits = model_(batch.x);
    loss += cross_entropy(logits, batch.y).item<float>() * static_cast<double>(indices.size());
    const std::vector<int64_t> labels = batch.y.to_vector<int64_t>(), guesses = argmax(logits, 1).to_vector<int64_t>();
    const std::vector<double> sureness = amax(softmax(logits, 1), 1).to_vector<double>();
    for (size_t k = 0; k < indices.size(); ++k) {
      ++confusion[static_cast<size_t>(labels[k]) * kClasses + static_cast<size_t>(guesses[k])];
      if (labels[k] != guesses[k]) mistakes.push_back({indices[k], labels[k], guesses[k], sureness[k], {}});
    }
    indices.clear();
  }
  group.all_reduce(std::span<double>(&loss, 1)).wait();
  group.all_reduce(std::span<int64_t>(confusion)).wait();
  mistakes = worst_of_all_ranks(group, std::move(mistakes));

  report::Evaluation& e = evaluation_;
  e = {};
  e.names.assign(FashionMnist::kClasses.begin(), FashionMnist::kClasses.end());
  e.worst = std::move(mistakes);
  int64_t right = 0;
  for (size_t label = 0; label < kClasses; ++label) {
    const auto row = confusion.begin() + static_cast<std::ptrdiff_t>(label * kClasses);
    e.confusion.emplace_back(row, row + kClasses);
    right += e.confusion[label][label];
  }
  for (report::Mistake& mistake : e.worst) {
    mistake.pixels = flatten(select(unseen_.images(), 0, mistake.index)).to_vector<uint8_t>();
  }
  const auto count = static_cast<double>(unseen_.size());
  return {{"test_loss", loss / count}, {"test_accuracy", static_cast<double>(right) / count}};
}

class FashionKind final : public TaskKind {
 public:
  const char* name() const override { return "fashion-mnist"; }
  const char* help() const override {
    return "Tell ten kinds of clothes apart: 60,000 pictures of 28 x 28, from Debian's package";
  }
  void list_options(TrainOptions&, OptionTable& table) override {
    table.add({.name = "model", .help = "what is trained", .target = &model_, .choices = {"cnn", "mlp", "resnet18"}});
  }
  std::unique_ptr<Task> make(const TrainOptions&) const override { return std::make_unique<FashionTask>(model_); }

 private:
  std::string model_ = "cnn";
};

}  // namespace

std::unique_ptr<TaskKind> fashion_kind() { return std::make_unique<FashionKind>(); }

}  // namespace chorale::train
