// A communication hook of one's own: what ranks send each other instead of whole gradients. This one sends the largest
// tenth of each bucket, as places and values, and keeps the rest for later steps (error feedback).
//
//   chorale run -n 2 ./own_hook
#include <iostream>
#include <map>

#include "chorale/chorale.h"

using namespace chorale;

class LargestTenth {
 public:
  comm::Future operator()(parallel::GradBucket& bucket) {
    Tensor& rest = rest_[bucket.index()];
    // Buckets are made anew after the first step.
    if (!rest || rest.elems() != bucket.buffer().elems()) rest = zeros_like(bucket.buffer());
    const Tensor wanted = bucket.buffer() + rest;
    const int64_t count = (wanted.elems() + 9) / 10;
    const Tensor places = topk(abs(wanted), count).indices;
    const Tensor values = gather(wanted, 0, places);
    rest = index_fill(wanted, 0, places, 0);

    // Every rank makes the same calls, and adds what all have sent.
    const comm::Group& group = bucket.group();
    const int64_t ranks = group.size();
    const Tensor all_places = empty({ranks * count}, DType::kI64), all_values = empty({ranks * count});
    group.all_gather_into(all_places, places).wait();
    const Tensor average = zeros_like(wanted);
    return group.all_gather_into(all_values, values).future().then([=](const Tensors& gathered) -> Tensors {
      return {index_add_(average, 0, all_places, gathered[0] / ranks)};
    });
  }

 private:
  std::map<size_t, Tensor> rest_;
};

int main() {
  comm::World world;
  world.init();
  comm::Group& group = world.group();
  parallel::DistributedDataParallel model(models::mlp({8, 64, 1}), group);
  model.register_comm_hook({"largest tenth", LargestTenth()});
  optim::Sgd optimizer(model.named_parameters(), {.lr = 0.02});

  manual_seed(static_cast<uint64_t>(group.rank()));  // its own data
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const Tensor x = normal({64, 8});
    optimizer.zero_grad();
    const Tensor loss = mse_loss(model(x), sum(sin(x), 1, true));
    backward(loss);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  if (group.rank() == 0) std::cout << "a tenth of the gradients: loss " << first << " -> " << last << "\n";
  return last < 0.3 * first ? 0 : 1;
}
