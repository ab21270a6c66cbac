// A parameter server: rank 0 has the weights, the other ranks fetch them, compute gradients on data of their own and
// push those back, each at its own pace.
//
//   chorale run -n 3 ./parameter_server
#include <cmath>
#include <iostream>
#include <mutex>

#include "chorale/chorale.h"

using namespace chorale;

// What the server does. Calls run on several threads of its process.
struct Server {
  static Tensor weights() {
    const std::lock_guard lock(mutex);
    return clone(w);
  }
  static void push(const Tensor& gradient) {
    const std::lock_guard lock(mutex);
    sub_(w, mul(gradient, 0.1));
  }
  static inline std::mutex mutex;
  static inline Tensor w = zeros({2});
};

int main() {
  comm::World world;
  world.init();  // the ranks that the launcher started
  rpc::AgentOptions options{.serves = {rpc::remote<Server::weights>, rpc::remote<Server::push>}};
  options.name = world.group().rank() == 0 ? "server" : concat("trainer", world.group().rank());
  rpc::Agent agent(world.group(), options);

  bool learnt = true;
  if (agent.info().name != "server") {
    // Points on the plane y = 3 a - 2 b; every trainer has its own.
    manual_seed(static_cast<uint64_t>(agent.info().id));
    const Tensor x = uniform({64, 2}, -1, 1), y = matmul(x, Tensor::from<float>({3, -2}, {2}));
    for (int step = 0; step < 200; ++step) {
      const Tensor w = set_requires_grad(agent.call<Server::weights>("server"));
      backward(mean(square(sub(matmul(x, w), y))));
      agent.call<Server::push>("server", gradient(w));
    }
    const auto found = agent.call<Server::weights>("server").to_vector<float>();
    std::cout << agent.info().name << " ends with " << found[0] << " " << found[1] << "\n";
    learnt = std::abs(found[0] - 3) < 0.05 && std::abs(found[1] + 2) < 0.05;
  }
  agent.shutdown();  // the server serves until all have come here
  return learnt ? 0 : 1;
}
