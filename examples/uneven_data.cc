// Ranks with different numbers of batches: a rank that runs out takes part in the others' calls until all have.
//
//   chorale run -n 2 ./uneven_data
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

int main() {
  comm::World world;
  world.init();
  comm::Group& group = world.group();

  parallel::DistributedDataParallel model(nn::Linear(4, 1), group);
  optim::Sgd optimizer(model.named_parameters(), {.lr = 0.05});
  const int batches = 100 + 50 * group.rank();  // rank 1 has half as many again
  Tensor loss;
  parallel::join({&model}, {}, [&] {
    for (int batch = 0; batch < batches; ++batch) {
      const Tensor x = normal({16, 4});
      optimizer.zero_grad();
      loss = mse_loss(model(x), sum(x, 1, true));
      backward(loss);
      optimizer.step();
    }
  });

  // Now all have the model of a rank that was among the last.
  const Tensor weight = detach(model.module().weight);
  const Tensor largest = clone(weight), smallest = clone(weight);
  group.all_reduce(largest, Reduce::kMax).wait();
  group.all_reduce(smallest, Reduce::kMin).wait();
  const bool equal = all(eq(largest, smallest)).item<bool>();
  std::cout << "rank " << group.rank() << ": " << batches << " batches, weight " << weight << "\n";
  return equal && loss.item<float>() < 0.05 ? 0 : 1;
}
