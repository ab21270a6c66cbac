// Data-parallel training: every rank works on its part of each batch, and all models stay equal.
//
//   chorale run -n 2 ./train_ddp
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

int main() {
  comm::World world;
  world.init();  // the ranks that the launcher started
  comm::Group& group = world.group();

  // Which of four quarters of the plane a point lies in. All ranks have the same data and visit their own part of it.
  manual_seed(1);
  const Tensor x = uniform({1024, 2}, -1, 1);
  const Tensor quarter = to(gt(x, 0), DType::kI64);
  data::TensorDataset dataset(x, select(quarter, 1, 0) * 2 + select(quarter, 1, 1));
  const auto part = std::make_shared<parallel::DistributedSampler>(dataset.size(), group);
  data::DataLoader loader(dataset, part, {.batch_size = 32});

  parallel::DistributedDataParallel model(models::mlp({2, 32, 4}), group);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
  Tensor loss;
  for (int epoch = 0; epoch < 5; ++epoch) {
    for (const auto& [points, answers] : loader) {
      optimizer.zero_grad();
      loss = cross_entropy(model(points), answers);
      backward(loss);  // gradients are averages over ranks when it returns
      optimizer.step();
    }
    if (group.rank() == 0) std::cout << "epoch " << epoch << ", " << group.size() << " ranks: loss " << loss << "\n";
  }
  return loss.item<float>() < 0.3 ? 0 : 1;
}
