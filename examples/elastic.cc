// Data-parallel training that goes on when ranks die; compare train_ddp.cc.
//
//   chorale run --elastic 1:2 -n 2 ./elastic
//
// Kill one of its processes: the others go on within the step, and a new one takes part soon after.
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

int main() {
  parallel::Elastic job;  // instead of comm::World

  manual_seed(1);
  const Tensor x = uniform({1024, 2}, -1, 1);
  const Tensor quarter = to(gt(x, 0), DType::kI64);
  data::TensorDataset dataset(x, select(quarter, 1, 0) * 2 + select(quarter, 1, 1));
  // 64 samples a step, however many ranks there are.
  const parallel::ElasticBatches batches(std::make_shared<data::RandomSampler>(dataset.size(), 1), 64);

  parallel::DistributedDataParallel model(models::mlp({2, 32, 4}), job.group());
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
  job.keep(model, optimizer);  // what a step changes, and a newcomer gets
  double loss = 0;
  job.run(80, [&](int64_t step) {  // instead of the loop
    const auto [points, answers] = dataset.get_batch(batches.of(step, job.group()));
    const Tensor own = cross_entropy(model(points), answers) * batches.weight(job.group());
    backward(own);
    loss = job.step(static_cast<double>(own.item<float>()) / job.group().size());  // instead of optimizer.step()
    if (step % 16 == 15 && job.group().rank() == 0)
      std::cout << "step " << step << ", " << job.group().size() << " ranks: loss " << loss << std::endl;
  });
  return loss < 0.3 ? 0 : 1;
}
