// A training loop with everything around the optimizer: products in bf16, a schedule of learning rates, clipping, and a
// state that is saved half way and goes on from there.
#include <filesystem>
#include <iostream>

#include "chorale/api/api.h"
#include "chorale/io/sharded.h"
#include "chorale/models/mlp.h"
#include "chorale/optim/optim.h"

using namespace chorale;

int main() {
  constexpr int kSteps = 200;
  auto model = models::mlp({16, 64, 64, 4});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  optim::Scheduler scheduler(optimizer, optim::cosine({.warmup_steps = 20, .steps = kSteps}));

  const Tensor x = uniform({256, 16}, -1, 1);
  const Tensor target = argmax(matmul(x, uniform({16, 4}, -1, 1)), 1);
  const auto path = std::filesystem::temp_directory_path() / "chorale-example-optimizer.safetensors";
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      loss = cross_entropy(model(x), target);
    }
    backward(loss);
    optim::clip_grad_norm(optimizer.parameters(), 1.0);
    optimizer.step();
    scheduler.step();

    last = loss.item<double>();
    if (step == 0) first = last;
    if (step % 50 == 0) std::cout << "step " << step << ": loss " << last << ", lr " << optimizer.lr() << '\n';
    if (step == kSteps / 2) {
      io::save(path, optimizer.state_dict());
      optimizer.load_state_dict(io::load(path).tensors);
      std::filesystem::remove(path);
    }
  }
  std::cout << "loss " << first << " -> " << last << '\n';
  return last < 0.5 * first ? 0 : 1;
}
