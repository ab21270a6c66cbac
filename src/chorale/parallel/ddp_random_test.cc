// Random models against a reference in plain numbers: shared and unused parameters by rank and step, dtypes, bucket
// sizes, passes that are not reduced, hooks, gradients kept or dropped.
#include <random>

#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/soak_test_util.h"

namespace chorale::parallel {
namespace {

struct Plan {
  int ranks = 2, steps = 6;
  std::vector<Shape> shapes;
  std::vector<DType> dtypes;
  DdpOptions options;
  bool hook = false;
  struct Step {
    bool reduced = true;
    enum { kKeep, kZero, kDrop } before = kKeep;
    // used[r][p]: how often rank r uses parameter p.
    std::vector<std::vector<int>> used;
  };
  std::vector<Step> plan;
};

Plan make_plan(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Plan p;
  // Powers of two and small whole numbers: every average is exact, in every dtype.
  p.ranks = pick(0, 2) == 0 ? 4 : 2;
  const int count = pick(3, 30);
  const DType kinds[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16};
  const int variety = pick(1, 4);
  for (int i = 0; i < count; ++i) {
    p.shapes.push_back(pick(0, 1) ? Shape{pick(1, 40)} : Shape{pick(1, 8), pick(0, 8)});
    p.dtypes.push_back(kinds[pick(0, variety - 1)]);
  }
  p.options.find_unused_parameters = pick(0, 1) ? FindUnused::kAuto : FindUnused::kOn;
  p.options.gradient_as_bucket_view = pick(0, 2) > 0;
  if (pick(0, 1)) p.options.bucket_cap_mb = pick(1, 400) / 1048576.0;
  p.hook = pick(0, 3) == 0;
  p.options.progress = pick(0, 2) == 0 ? Progress::kHelper : Progress::kCaller;
  for (int s = 0; s < p.steps; ++s) {
    Plan::Step step;
    step.reduced = s + 1 == p.steps || pick(0, 3) > 0;
    const int before = pick(0, 2);
    step.before = before == 0 ? Plan::Step::kKeep : before == 1 ? Plan::Step::kZero : Plan::Step::kDrop;
    for (int r = 0; r < p.ranks; ++r) {
      step.used.emplace_back();
      for (int i = 0; i < count; ++i) step.used.back().push_back(pick(0, 3) == 0 ? 0 : pick(0, 4) == 0 ? 2 : 1);
    }
    // Without any gradient there is no backward, and the others would wait for this rank's.
    for (std::vector<int>& used : step.used) used[static_cast<size_t>(pick(0, count - 1))] = 1;
    p.plan.push_back(std::move(step));
  }
  return p;
}

// What the gradient of parameter i grows by, in all its elements, when rank r uses it in a step.
int contribution(int r, int step, size_t i) { return 4 * (1 + (r + step + static_cast<int>(i)) % 3); }

struct Parameters : nn::Module {
  std::vector<nn::Parameter> p;
  CHORALE_MODULE(Parameters, p)
  Tensor forward(const std::vector<int>& used, int rank, int step) {
    Tensor total = zeros({}, DType::kF64);
    for (size_t i = 0; i < p.size(); ++i) {
      for (int k = 0; k < used[i]; ++k) {
        total = add(total, to(sum(mul(p[i], contribution(rank, step, i))), DType::kF64));
      }
    }
    return total;
  }
};

// One number for each parameter and rank: all its elements are equal. None: no gradient.
using Gradients = std::vector<std::vector<std::optional<double>>>;

void reference_step(const Plan& plan, int s, Gradients& gradients, std::vector<std::vector<bool>>& used) {
  const Plan::Step& step = plan.plan[static_cast<size_t>(s)];
  const auto ranks = static_cast<size_t>(plan.ranks);
  for (size_t i = 0; i < plan.shapes.size(); ++i) {
    bool anybody = false;
    double total = 0;
    for (size_t r = 0; r < ranks; ++r) {
      auto& g = gradients[r][i];
      if (step.before == Plan::Step::kDrop) g.reset();
      if (step.before == Plan::Step::kZero && g) g = 0;
      const int times = step.used[r][i];
      if (times > 0) g = g.value_or(0) + times * contribution(static_cast<int>(r), s, i);
      used[r][i] = used[r][i] || times > 0;
      anybody = anybody || used[r][i];
      total += g.value_or(0);
    }
    if (!step.reduced) continue;
    for (size_t r = 0; r < ranks; ++r) {
      if (anybody) gradients[r][i] = total / plan.ranks;
      used[r][i] = false;
    }
  }
}

void run_plan(unsigned seed) {
  const Plan plan = make_plan(seed);
  const size_t count = plan.shapes.size();
  std::vector<Gradients> expected;
  Gradients gradients(static_cast<size_t>(plan.ranks), std::vector<std::optional<double>>(count));
  std::vector<std::vector<bool>> used(static_cast<size_t>(plan.ranks), std::vector<bool>(count));
  for (int s = 0; s < plan.steps; ++s) {
    reference_step(plan, s, gradients, used);
    expected.push_back(gradients);
  }
  run_ranks(plan.ranks, [&](comm::Group& group) {
    Parameters net;
    for (size_t i = 0; i < count; ++i) net.p.emplace_back(ones(plan.shapes[i], plan.dtypes[i]));
    DistributedDataParallel ddp(net, group, plan.options);
    if (plan.hook) {
      ddp.register_comm_hook({"average", [](GradBucket& bucket) {
                                return bucket.group().all_reduce(bucket.buffer(), Reduce::kAverage).future();
                              }});
    }
    const auto r = static_cast<size_t>(group.rank());
    for (int s = 0; s < plan.steps; ++s) {
      const Plan::Step& step = plan.plan[static_cast<size_t>(s)];
      if (step.before != Plan::Step::kKeep) ddp.zero_grad(step.before == Plan::Step::kDrop);
      std::optional<DataParallelBase::NoSync> scope;
      if (!step.reduced) scope.emplace(ddp);
      const Tensor loss = ddp(step.used[r], group.rank(), s);
      backward(loss);
      for (size_t i = 0; i < count; ++i) {
        const Tensor g = gradient(ddp.module().p[i]);
        const auto& wanted = expected[static_cast<size_t>(s)][r][i];
        ASSERT_EQ(g.defined(), wanted.has_value()) << "seed " << seed << ", step " << s << ", parameter " << i;
        if (!wanted) continue;
        for (double value : g.to_vector<double>()) {
          ASSERT_EQ(value, *wanted) << "seed " << seed << ", step " << s << ", parameter " << i;
        }
      }
    }
  });
}

class RandomModels : public testing::TestWithParam<unsigned> {};
INSTANTIATE_TEST_SUITE_P(Ddp, RandomModels, testing::Range(0u, 200u, 25u));

// A long run has as many seeds as are asked for (docs/dev/testing.md).
TEST_P(RandomModels, HaveTheGradientsOfTheReference) {
  const auto seeds = static_cast<unsigned>(seeds_to_try(25, 625));
  const unsigned first = GetParam() / 25 * seeds;
  for (unsigned seed = first; seed < first + seeds; ++seed) {
    run_plan(seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace chorale::parallel
