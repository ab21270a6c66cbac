// Two ranks train the benchmark models as PyTorch's do (tools/oracle/record_ddp.py): reduction, buffers, modules,
// gradients and optimizers together.
#include <nlohmann/json.hpp>

#include "chorale/base/parallel_for.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/models/mlp.h"
#include "chorale/nn/oracle_file_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using nn::oracle::Json;

struct Case {
  std::string name;
  Shape shape;
  int64_t classes;
  DType dtype;
};

// One rank's losses, averaged over ranks; parameters are left in `model`.
template <class M>
std::vector<double> train(const comm::Group& group, M& model, const Case& c, bool adam, size_t steps) {
  DistributedDataParallel ddp(model, group);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (adam) {
    optimizer =
        std::make_unique<optim::AdamW>(ddp.named_parameters(), optim::AdamWOptions{.lr = 1e-3, .weight_decay = 0.01});
  } else {
    optimizer = std::make_unique<optim::Sgd>(ddp.named_parameters(), optim::SgdOptions{.lr = 0.05});
  }
  std::vector<double> losses;
  for (size_t step = 0; step < steps; ++step) {
    const int seed = static_cast<int>(step);
    const bool tokens = c.classes > 10;
    const Tensor x = tokens ? op::sample_ints(c.shape, 0, c.classes, 1000 + seed)
                            : to(op::sample(c.shape, 1000 + seed, -1, 1), c.dtype);
    const Tensor target = tokens ? x : op::sample_ints({c.shape[0]}, 0, c.classes, 2000 + seed);
    const int64_t rows = c.shape[0] / 2;
    const auto half = [&](const Tensor& all) { return narrow(all, 0, rows * group.rank(), rows); };
    optimizer->zero_grad();
    const Tensor loss = cross_entropy(flatten(ddp(half(x)), 0, -2), flatten(half(target)));
    backward(loss);
    optimizer->step();
    double mean = loss.item<double>();
    group.all_reduce(std::span(&mean, 1), Reduce::kAverage).wait();
    losses.push_back(mean);
  }
  return losses;
}

template <class Make>
void equals_pytorch(const Case& c, const Make& make) {
  const Json expected = nn::oracle::read_oracle("ddp.json")[c.name][std::string(name_of(c.dtype))];
  const double tolerance = c.dtype == DType::kF64 ? 1e-9 : 1e-4;
  run_ranks(2, [&](comm::Group& group) {
    set_thread_count(1);
    const auto fresh = [&] {
      auto model = make();
      model.to(c.dtype);
      models::fill_by_formula(model);
      return model;
    };
    auto with_adam = fresh();
    const std::vector<double> losses = train(group, with_adam, c, true, expected["losses"].size());
    for (size_t step = 0; step < losses.size(); ++step) {
      const double want = expected["losses"][step];
      ASSERT_NEAR(losses[step], want, tolerance * want) << c.name << " in " << c.dtype << ", step " << step;
    }
    auto with_sgd = fresh();
    train(group, with_sgd, c, false, expected["losses"].size());
    for (const auto& [name, parameter] : with_sgd.named_parameters()) {
      const double want = expected["sums"].at(name);
      const Tensor total = sum(abs(to(detach(parameter), DType::kF64)));
      EXPECT_NEAR(total.template item<double>(), want, tolerance * want) << c.name << " in " << c.dtype << ", " << name;
    }
  });
}

class AsPyTorch : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Ddp, AsPyTorch, testing::Values(DType::kF32, DType::kF64),
                         [](const auto& p) { return std::string(name_of(p.param)); });

TEST_P(AsPyTorch, Tinymlp) {
  equals_pytorch({"tinymlp", {8, 20}, 10, GetParam()}, [] { return models::mlp({20, 32, 10}); });
}
TEST_P(AsPyTorch, Mlp512x4) {
  equals_pytorch({"mlp512x4", {32, 512}, 10, GetParam()}, [] { return models::mlp({512, 512, 512, 512, 512, 10}); });
}
TEST_P(AsPyTorch, CnnFashion) {
  equals_pytorch({"cnn_fashion", {32, 1, 28, 28}, 10, GetParam()}, [] { return models::fashion_cnn(); });
}
TEST_P(AsPyTorch, Bert256x4) {
  equals_pytorch({"bert_256x4", {2, 32}, 8192, GetParam()}, [] { return models::Encoder(); });
}

}  // namespace
}  // namespace chorale::parallel
