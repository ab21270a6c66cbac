// The same program under a cluster's own launcher: ranks that mpirun or srun started find each other without a word.
//
//   mpirun -n 2 ./under_mpirun
//
// CHORALE_FABRIC=mpi in front of it moves the data with MPI's own collectives instead of ours.
#include <cmath>
#include <iostream>
#include <numbers>

#include "chorale/chorale.h"

using namespace chorale;

int main() {
  comm::World world;
  world.init();
  comm::Group& group = world.group();

  // How many random points of a square lie in the circle inside it: each rank throws its own.
  constexpr int64_t kPoints = 1'000'000;
  manual_seed(static_cast<uint64_t>(group.rank()));
  const Tensor points = uniform({kPoints, 2}, -1, 1);
  const Tensor inside = sum(to(lt(sum(square(points), 1), 1), DType::kF64));
  group.all_reduce(inside).wait();

  const double pi = 4 * inside.item<double>() / static_cast<double>(kPoints * group.size());
  std::cout << "rank " << group.rank() << " of " << group.size() << ": pi is about " << pi << "\n";
  return group.size() == 2 && std::abs(pi - std::numbers::pi) < 0.01 ? 0 : 1;
}
