// Actors play, a learner learns: rank 0 has the policy, the other ranks ask it what to do and tell it what came of it.
// The game: a goal appears on the left or on the right; going there is rewarded.
//
//   chorale run -n 3 ./actor_learner
#include <iostream>
#include <mutex>

#include "chorale/chorale.h"

using namespace chorale;

// What an actor saw, did and got in an episode: a number for each move.
struct Episode {
  Tensor seen, went_right, reward;
  CHORALE_MESSAGE(Episode, seen, went_right, reward)
};

struct Learner {
  // The probability of going right, for what an actor sees.
  static double policy(double seen) {
    const std::lock_guard lock(mutex);
    return sigmoid(mul(w, seen)).item<double>();
  }
  // One step towards what was rewarded more than a coin would be (REINFORCE). Returns the number of this step.
  static int64_t learn(const Episode& episode) {
    const std::lock_guard lock(mutex);
    const Tensor weight = set_requires_grad(clone(w));
    const Tensor right = sigmoid(mul(episode.seen, weight));
    const Tensor done = where(gt(episode.went_right, 0.5), right, sub(ones_like(right), right));
    backward(sum(mul(log(done), sub(episode.reward, 0.5))));
    const NoGrad quiet;
    add_(w, gradient(weight), 0.05);
    return ++steps;
  }
  static inline std::mutex mutex;
  static inline Tensor w = zeros({1}, DType::kF64);
  static inline int64_t steps = 0;
};

// Plays an episode, lets the learner learn from it, and returns the share of moves that were rewarded.
double play(rpc::Agent& agent, int64_t moves) {
  const Episode episode{uniform({moves}, -1, 1, DType::kF64), uniform({moves}, 0, 1, DType::kF64),
                        zeros({moves}, DType::kF64)};
  const auto seen = episode.seen.data<double>(), right = episode.went_right.data<double>(),
             reward = episode.reward.data<double>();
  for (size_t i = 0; i < static_cast<size_t>(moves); ++i) {
    right[i] = right[i] < agent.call<Learner::policy>("learner", seen[i]) ? 1 : 0;
    reward[i] = (seen[i] > 0) == (right[i] == 1) ? 1 : 0;
  }
  agent.call<Learner::learn>("learner", episode);
  return mean(episode.reward).item<double>();
}

int main() {
  comm::World world;
  world.init();
  rpc::AgentOptions options{.serves = {rpc::remote<Learner::policy>, rpc::remote<Learner::learn>}};
  options.name = world.group().rank() == 0 ? "learner" : concat("actor", world.group().rank());
  rpc::Agent agent(world.group(), options);
  bool learnt = true;
  if (agent.info().name != "learner") {
    manual_seed(static_cast<uint64_t>(agent.info().id));
    double late = 0;  // the mean of the last ten episodes
    for (int episode = 0; episode < 40; ++episode) late += play(agent, 50) * (episode < 30 ? 0 : 0.1);
    std::cout << agent.info().name << " ends with " << late << " of the rewards\n";
    learnt = late > 0.75;
  }
  agent.shutdown();  // the learner serves until all have come here
  if (agent.info().name == "learner") learnt = Learner::steps == 40 * (world.group().size() - 1);
  return learnt ? 0 : 1;
}
