// Communication alone, on plain C++ memory and on tensors; nothing is trained.
//
//   chorale run -n 4 ./collectives
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;
using namespace std::chrono_literals;

int main() {
  comm::World world;
  world.init();
  comm::Group& group = world.group();
  const int rank = group.rank(), size = group.size();

  // A sum over all ranks, in place. Calls return at once; wait() returns when the result is there.
  std::vector<double> mine(1000, rank + 1);
  group.all_reduce(std::span(mine)).wait();

  // Every rank's number, on every rank.
  const Tensor numbers = empty({size}, DType::kI64);
  group.all_gather_into(numbers, full({1}, 10 * rank, DType::kI64)).wait();

  // A message to the next rank, with a deadline.
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  const Tensor token = full({1}, rank), received = empty({1});
  const comm::Work sending = group.isend(token, next);
  group.irecv(received, previous).synchronize(within(10s));
  sending.wait();

  // Values of any shape: numbers, strings, lists, maps.
  const auto names = all_gather_object(group, comm::Map{{"rank", rank}, {"name", "rank " + std::to_string(rank)}});
  const std::string last = names.back().as<comm::Map>().at("name").as<std::string>();

  // Even and odd ranks among themselves.
  comm::Group half = group.split(rank % 2);
  const Tensor in_half = full({1}, 1);
  half.all_reduce(in_half).wait();

  std::cout << "rank " << rank << ": sum " << mine[0] << ", numbers " << numbers << ", from " << previous << ": "
            << received.item<float>() << ", last is '" << last << "', half of " << in_half.item<float>() << "\n";
  const bool right = mine[999] == size * (size + 1) / 2.0 && received.item<int>() == previous &&
                     last == "rank " + std::to_string(size - 1) && in_half.item<int>() == half.size();
  return right ? 0 : 1;
}
