// A pipeline of three stages, a process each. The batch is cut into micro-batches. Every stage makes as many forwards
// as there are stages behind it, and then one forward and one backward in turn (1F1B), so that it keeps few
// activations.
//
//   chorale run -n 3 ./pipeline
#include <cmath>
#include <iostream>
#include <map>
#include <mutex>

#include "chorale/chorale.h"

using namespace chorale;

constexpr int64_t kMicroBatches = 8;
constexpr int kSteps = 30;

struct Stage : nn::Module {
  Stage(int64_t in, int64_t out) : linear(in, out) {}
  nn::Linear linear;
  CHORALE_MODULE(Stage, linear)
  Tensor forward(const Tensor& x) { return tanh(linear(x)); }
};
// The same weights in every process.
std::vector<Stage> make_stages() {
  manual_seed(1);
  std::vector<Stage> stages;
  stages.emplace_back(4, 16);
  stages.emplace_back(16, 16);
  stages.emplace_back(16, 1);
  return stages;
}

// What neighbours send: activations from the stage before, gradients from the one behind, by the number of the
// micro-batch. It may come before this stage asks for it, or after.
struct Inbox {
  static void put_activation(int64_t micro, const Tensor& x) { activations.at(micro).set(x); }
  static void put_gradient(int64_t micro, const Tensor& dx) { gradients.at(micro).set(dx); }

  struct Shelf {
    rpc::Future<Tensor> at(int64_t micro) {
      const std::lock_guard lock(mutex);
      return there[micro];
    }
    Tensor take(int64_t micro) {
      Tensor x = at(micro).wait();
      const std::lock_guard lock(mutex);
      there.erase(micro);
      return x;
    }
    std::mutex mutex;
    std::map<int64_t, rpc::Future<Tensor>> there;
  };
  static inline Shelf activations, gradients;
};

Tensor loss_of(const Tensor& out, const Tensor& target) { return mean(square(sub(out, target))); }

int main() {
  comm::World world;
  world.init();
  rpc::Agent agent(world.group(), {.serves = {rpc::remote<Inbox::put_activation>, rpc::remote<Inbox::put_gradient>}});
  const int stage = agent.info().id, stages = static_cast<int>(agent.workers().size());
  const bool is_first = stage == 0, is_last = stage == stages - 1;
  std::vector<Stage> all = make_stages();
  Stage& own = all[static_cast<size_t>(stage)];
  optim::Sgd optimizer(own.named_parameters(), {.lr = 0.2});

  manual_seed(2);
  const Tensor x = uniform({64, 4}, -1, 1),
               y = tanh(sum(mul(x, Tensor::from<float>({1, -1, 2, 0.5}, {1, 4})), {1}, true));
  const std::vector<Tensor> inputs = chunk(x, kMicroBatches, 0), targets = chunk(y, kMicroBatches, 0);

  std::vector<double> losses;
  size_t most_kept = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    std::map<int64_t, std::pair<Tensor, Tensor>> kept;  // input and output of a micro-batch, until its backward
    std::vector<rpc::Future<void>> sent;
    double loss = 0;
    const auto forward = [&](int64_t micro) {
      // What comes from another process and wants a gradient is a leaf here.
      const Tensor in =
          is_first ? inputs[static_cast<size_t>(micro)] : Inbox::activations.take(step * kMicroBatches + micro);
      Tensor out = own(in);
      if (is_last) {
        out = div(loss_of(out, targets[static_cast<size_t>(micro)]), kMicroBatches);
        loss += out.item<double>();
      } else {
        sent.push_back(agent.call_async<Inbox::put_activation>(stage + 1, step * kMicroBatches + micro, out));
      }
      kept[micro] = {in, out};
      most_kept = std::max(most_kept, kept.size());
    };
    const auto go_back = [&](int64_t micro) {
      const auto [in, out] = kept.at(micro);
      backward(out, is_last ? Tensor() : Inbox::gradients.take(step * kMicroBatches + micro));
      if (!is_first)
        sent.push_back(agent.call_async<Inbox::put_gradient>(stage - 1, step * kMicroBatches + micro, gradient(in)));
      kept.erase(micro);
    };
    for (int64_t forwards = 0, backwards = 0; backwards < kMicroBatches;) {
      if (forwards < kMicroBatches && forwards - backwards < stages - stage) {
        forward(forwards++);
      } else {
        go_back(backwards++);
      }
    }
    rpc::wait_all(sent);
    optimizer.step();
    losses.push_back(loss);
  }

  bool is_right = most_kept == static_cast<size_t>(stages - stage);
  if (is_last) {
    // One process with the whole batch learns the same.
    std::vector<Stage> alone = make_stages();
    std::vector<std::unique_ptr<optim::Sgd>> optimizers;
    for (Stage& one : alone)
      optimizers.push_back(std::make_unique<optim::Sgd>(one.named_parameters(), optim::SgdOptions{.lr = 0.2}));
    double worst = 0;
    for (const double loss : losses) {
      for (auto& one : optimizers) one->zero_grad();
      const Tensor whole = loss_of(alone[2](alone[1](alone[0](x))), y);
      backward(whole);
      for (auto& one : optimizers) one->step();
      worst = std::max(worst, std::abs(loss - whole.item<double>()));
    }
    std::cout << "loss " << losses.front() << " -> " << losses.back() << ", at most " << worst
              << " from that of one process\n";
    is_right = is_right && losses.back() < 0.3 * losses.front() && worst < 1e-5;
  }
  std::cout << "stage " << stage << " kept at most " << most_kept << " micro-batches\n";
  agent.shutdown();
  return is_right ? 0 : 1;
}
