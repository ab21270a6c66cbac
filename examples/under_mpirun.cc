// The same program under a cluster's own launcher: ranks that mpirun or srun started find each other without a word.
//
//   mpirun -n 2 ./under_mpirun
//
// CHORALE_FABRIC=mpi in front of it moves the data with MPI's own collectives instead of ours.
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

int main() {
  comm::World world;
  world.init();
  comm::Group& group = world.group();

  parallel::DistributedDataParallel model(nn::Linear(2, 1), group);
  optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
  manual_seed(static_cast<uint64_t>(group.rank()));
  Tensor loss;
  for (int step = 0; step < 100; ++step) {
    const Tensor x = normal({32, 2});
    optimizer.zero_grad();
    loss = mse_loss(model(x), sum(x, 1, true));
    backward(loss);
    optimizer.step();
  }
  std::cout << "rank " << group.rank() << " of " << group.size() << ": loss " << loss << "\n";
  return group.size() == 2 && loss.item<float>() < 0.01 ? 0 : 1;
}
