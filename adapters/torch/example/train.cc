// Data-parallel training of a libtorch module: every rank works on its part of each batch, and all models stay equal.
//
//   chorale run -n 2 ./train
#include <iostream>

#include "adapters/torch/ddp.h"
#include "chorale/comm/world.h"

int main() {
  chorale::comm::World world;
  world.init();  // the ranks that the launcher started
  const auto& group = world.group();

  // Which of four quarters of the plane a point lies in; every rank has points of its own.
  torch::manual_seed(1 + group.rank());
  const auto x = torch::rand({512, 2}) * 2 - 1;
  const auto quarter = (x > 0).to(torch::kLong);
  const auto y = quarter.select(1, 0) * 2 + quarter.select(1, 1);

  torch::nn::Sequential net(torch::nn::Linear(2, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  chorale_torch::DistributedDataParallel ddp(net, group);  // all ranks begin with rank 0's weights
  torch::optim::Adam optimizer(ddp.parameters(), 0.02);
  torch::Tensor loss;
  for (int step = 0; step < 200; ++step) {
    const auto at = torch::randint(512, {64});
    optimizer.zero_grad();
    loss = torch::cross_entropy_loss(ddp(x.index_select(0, at)), y.index_select(0, at));
    loss.backward();  // gradients are averages over ranks when it returns
    optimizer.step();
  }
  if (group.rank() == 0) std::cout << group.size() << " ranks: loss " << loss.item<float>() << "\n";
  return loss.item<float>() < 0.3 ? 0 : 1;
}
