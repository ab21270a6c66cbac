#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>

#include "chorale/api/api.h"
#include "chorale/app/progress.h"
#include "chorale/app/train.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel.h"
#include "chorale/data/fashion_mnist.h"
#include "chorale/data/loader.h"
#include "chorale/models/cnn.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/distributed_sampler.h"

namespace chorale::app {
namespace {

using data::FashionMnist;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

nn::Sequential make_model(const std::string& name) {
  if (name == "cnn") return models::fashion_cnn();
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 256), nn::ReLU(),
                        nn::Linear(256, 10));
}

int64_t count_parameters(const nn::Sequential& model) {
  int64_t count = 0;
  for (const auto& [name, parameter] : model.named_parameters()) count += parameter.elems();
  return count;
}

// The share of pictures whose class the model names. Each rank looks at some of them.
double accuracy(nn::Sequential& model, const FashionMnist& pictures, const comm::Group& group) {
  model.eval();
  const NoGrad scope;
  int64_t right = 0;
  std::vector<int64_t> indices;
  for (int64_t i = group.rank(); i < pictures.size(); i += group.size()) {
    indices.push_back(i);
    if (indices.size() < 500 && i + group.size() < pictures.size()) continue;
    const auto [x, y] = pictures.get_batch(indices);
    right += sum(eq(argmax(model(x), 1), y)).item<int64_t>();
    indices.clear();
  }
  model.train();
  const Tensor total = Tensor::scalar(right, DType::kI64);
  group.all_reduce(total).wait();
  return static_cast<double>(total.item<int64_t>()) / static_cast<double>(pictures.size());
}

}  // namespace

void train_fashion_mnist(const TrainOptions& options, const comm::Group& group, std::FILE* out) {
  CHORALE_CHECK(options.batch % group.size() == 0, "[train] a batch of ", options.batch,
                " pictures cannot be dealt to ", group.size(), " ranks equally; choose a multiple of ", group.size());
  manual_seed(options.seed);
  const FashionMnist pictures(FashionMnist::Split::kTrain), unseen(FashionMnist::Split::kTest);
  parallel::DistributedDataParallel model(make_model(options.model), group);
  data::DataLoader loader(
      pictures,
      std::make_shared<parallel::DistributedSampler>(
          pictures.size(), group, parallel::DistributedSamplerOptions{.seed = options.seed, .drop_last = true}),
      {.batch_size = options.batch / group.size(), .drop_last = true, .seed = options.seed});
  const int64_t all_steps = loader.size() * options.epochs;
  const int64_t steps = options.steps > 0 ? std::min(options.steps, all_steps) : all_steps;
  CHORALE_CHECK(steps > 0, "[train] a batch of ", options.batch, " is larger than the ", pictures.size(),
                " training pictures; choose a smaller one");
  optim::AdamW optimizer(model.named_parameters(), {.lr = options.lr});
  auto scheduler = optim::Scheduler::one_cycle(optimizer, {.max_lr = options.lr, .steps = steps + 1});

  const bool speaks = group.rank() == 0;
  Progress progress(out, options.quiet || !speaks ? Progress::Style::kQuiet : Progress::style_for(out), steps);
  progress.say(fmt::format("Fashion-MNIST: {} pictures to learn from, {} to be tested with", grouped(pictures.size()),
                           grouped(unseen.size())));
  progress.say(fmt::format("{} with {} parameters; epochs of {} steps of {} pictures; ranks: {}, threads of each: {}",
                           options.model, grouped(count_parameters(model.module())), grouped(loader.size()),
                           options.batch, group.size(), thread_count()));
  const Interrupt interrupt;
  const auto start = Clock::now();
  double result = 0;
  int64_t step = 0;
  for (int epoch = 1; step < steps; ++epoch) {
    const auto epoch_start = Clock::now();
    double total_loss = 0, recent = 0;
    int64_t in_epoch = 0;
    const auto speed = [&] {
      return grouped(static_cast<int64_t>(static_cast<double>(in_epoch * options.batch) / seconds_since(epoch_start)));
    };
    for (const auto& [x, y] : loader) {
      optimizer.zero_grad();
      const Tensor loss = cross_entropy(model(x), y);
      backward(loss);
      optimizer.step();
      scheduler.step();
      const double value = loss.item<float>();  // of this rank's part of the batch
      total_loss += value;
      ++in_epoch;
      recent = in_epoch == 1 ? value : 0.98 * recent + 0.02 * value;
      progress.show(++step,
                    fmt::format("epoch {}/{}  loss {:.3f}  {} pictures/s", epoch, options.epochs, recent, speed()));
      if (step == steps) break;
      if (Interrupt::requested(group)) {
        progress.say(fmt::format("interrupted after step {} of {}; nothing was saved", grouped(step), grouped(steps)));
        throw CLI::RuntimeError(128 + SIGINT);
      }
    }
    const std::string pictures_per_second = speed();
    result = accuracy(model.module(), unseen, group);
    progress.say(fmt::format("epoch {}/{}  loss {:.3f}  test accuracy {:.2f} %  {} pictures/s  {}", epoch,
                             options.epochs, total_loss / static_cast<double>(in_epoch), result * 100,
                             pictures_per_second, clock_text(seconds_since(start))));
  }
  if (speaks) {
    fmt::print(out, "test accuracy {:.2f} % after {} steps, {:.1f} s\n", result * 100, grouped(steps),
               seconds_since(start));
  }
}

}  // namespace chorale::app
