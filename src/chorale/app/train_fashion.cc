#include <fmt/format.h>

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/app/progress.h"
#include "chorale/app/train.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/base/parallel.h"
#include "chorale/data/fashion_mnist.h"
#include "chorale/data/loader.h"
#include "chorale/models/cnn.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"

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

// The share of pictures whose class the model names.
double accuracy(nn::Sequential& model, const FashionMnist& pictures) {
  model.eval();
  const NoGrad scope;
  int64_t right = 0;
  data::DataLoader loader(pictures, {.batch_size = 500});
  for (const auto& [x, y] : loader) right += sum(eq(argmax(model(x), 1), y)).item<int64_t>();
  model.train();
  return static_cast<double>(right) / static_cast<double>(pictures.size());
}

}  // namespace

double train_fashion_mnist(const TrainOptions& options) {
  set_thread_count(options.threads > 0 ? options.threads : usable_cores());
  manual_seed(options.seed);
  const FashionMnist pictures(FashionMnist::Split::kTrain), unseen(FashionMnist::Split::kTest);
  nn::Sequential model = make_model(options.model);
  data::DataLoader loader(
      pictures, {.batch_size = options.batch, .shuffle = true, .drop_last = true, .workers = 1, .seed = options.seed});
  const int64_t all_steps = loader.size() * options.epochs;
  const int64_t steps = options.steps > 0 ? std::min(options.steps, all_steps) : all_steps;
  CHORALE_CHECK(steps > 0, "[train] a batch of ", options.batch, " is larger than the ", pictures.size(),
                " training pictures; choose a smaller one");
  optim::AdamW optimizer(model.named_parameters(), {.lr = options.lr});
  auto scheduler = optim::Scheduler::one_cycle(optimizer, {.max_lr = options.lr, .steps = steps + 1});

  Progress progress(stdout, options.quiet ? Progress::Style::kQuiet : Progress::style_for(stdout), steps);
  progress.say(fmt::format("Fashion-MNIST: {} pictures to learn from, {} to be tested with", grouped(pictures.size()),
                           grouped(unseen.size())));
  progress.say(fmt::format("{} with {} parameters, {} epochs of {} steps of {} pictures, {} threads", options.model,
                           grouped(count_parameters(model)), options.epochs, grouped(loader.size()), options.batch,
                           thread_count()));
  const Interrupt interrupt;
  const auto start = Clock::now();
  double result = 0;
  int64_t step = 0;
  for (int epoch = 1; step < steps; ++epoch) {
    const auto epoch_start = Clock::now();
    double total_loss = 0, recent = 0;
    int64_t in_epoch = 0;
    for (const auto& [x, y] : loader) {
      optimizer.zero_grad();
      const Tensor loss = cross_entropy(model(x), y);
      backward(loss);
      optimizer.step();
      scheduler.step();
      const double value = loss.item<float>();
      total_loss += value;
      ++in_epoch;
      recent = in_epoch == 1 ? value : 0.98 * recent + 0.02 * value;
      progress.show(++step, fmt::format("epoch {}/{}  loss {:.3f}  {} pictures/s", epoch, options.epochs, recent,
                                        grouped(static_cast<int64_t>(static_cast<double>(in_epoch * options.batch) /
                                                                     seconds_since(epoch_start)))));
      if (step == steps) break;
      if (Interrupt::requested()) {
        progress.say(fmt::format("interrupted after step {} of {}", grouped(step), grouped(steps)));
        throw StateError("[train] stopped by a signal; nothing was saved");
      }
    }
    const double seconds = seconds_since(epoch_start);
    result = accuracy(model, unseen);
    progress.say(fmt::format("epoch {}/{}  loss {:.3f}  test accuracy {:.2f} %  {} pictures/s  {}", epoch,
                             options.epochs, total_loss / static_cast<double>(in_epoch), result * 100,
                             grouped(static_cast<int64_t>(static_cast<double>(in_epoch * options.batch) / seconds)),
                             clock_text(seconds_since(start))));
  }
  fmt::print("test accuracy {:.2f} % after {} steps, {:.1f} s\n", result * 100, grouped(steps), seconds_since(start));
  return result;
}

}  // namespace chorale::app
