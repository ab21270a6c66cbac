// Fashion-MNIST: ten kinds of clothes.
#include "chorale/train/tasks.h"

#include "chorale/api/api.h"
#include "chorale/data/fashion_mnist.h"
#include "chorale/io/safetensors.h"
#include "chorale/models/cnn.h"
#include "chorale/models/resnet.h"
#include "chorale/nn/nn.h"
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
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::Sampler> sampler,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<FashionMnist>>(pictures_, std::move(sampler), options);
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
  void save(const std::filesystem::path& folder) const override {
    io::save(folder / "model.safetensors", model_.state_dict());
  }

 private:
  std::string name_;
  FashionMnist pictures_{FashionMnist::Split::kTrain}, unseen_{FashionMnist::Split::kTest};
  nn::Sequential model_;
};

// Each rank looks at some of the pictures.
Metrics FashionTask::evaluate(const comm::Group& group) {
  std::array<double, 2> sums = {};  // loss, right
  std::vector<int64_t> indices;
  for (int64_t i = group.rank(); i < unseen_.size(); i += group.size()) {
    indices.push_back(i);
    if (indices.size() < 500 && i + group.size() < unseen_.size()) continue;
    const Outcome outcome = forward(unseen_.get_batch(indices));
    sums[0] += outcome.loss.item<float>() * static_cast<double>(indices.size());
    sums[1] += static_cast<double>(outcome.right.item<int64_t>());
    indices.clear();
  }
  group.all_reduce(std::span<double>(sums)).wait();
  const auto count = static_cast<double>(unseen_.size());
  return {{"test_loss", sums[0] / count}, {"test_accuracy", sums[1] / count}};
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
