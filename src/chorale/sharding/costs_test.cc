// What redistributions are reckoned to cost: section A5 of spec/tensor-parallel.md.
#include "chorale/sharding/costs.h"

#include "chorale/base/error.h"
#include "chorale/op/samples.h"
#include "chorale/sharding/redistribute.h"
#include "chorale/sharding/sharding_test_util.h"

namespace chorale {
namespace {

const Placement S0 = shard(0), S1 = shard(1), R = replicate(), P = partial();

// The constants of A5's model, by hand: 6.6 us to begin, 0.6 us a hop and 87.7 GB/s inside a host; 2.7 us and 0.22 of
// that speed between hosts.
TEST(Costs, AreHigherBetweenHosts) {
  const double bytes = 8.77e6;
  const auto cost = [&](const Placement& from, const Placement& to, bool hosts) {
    return sharding::cost_of(from, to, {.ranks = 4, .spans_hosts = hosts}, bytes);
  };
  EXPECT_NEAR(cost(S0, R, false), 6.6 + 3 * 0.6 + 75, 1e-9);
  EXPECT_NEAR(cost(S0, R, true), 6.6 + 3 * 2.7 + 75 / 0.22, 1e-9);
  EXPECT_NEAR(cost(S0, S1, true), 6.6 + 3 * 2.7 + 75 / 0.22 + 1, 1e-9);
  EXPECT_NEAR(cost(P, R, false), 6.6 + 6 * 0.6 + 150, 1e-9);
  EXPECT_NEAR(cost(P, R, true), 6.6 + 6 * 2.7 + 150 / 0.22, 1e-9);
  EXPECT_NEAR(cost(P, S1, true), 6.6 + 3 * 2.7 + 75 / 0.22, 1e-9);
  EXPECT_EQ(cost(R, S0, true), 0);
  EXPECT_EQ(cost(S0, P, true), std::numeric_limits<double>::infinity());
}

TEST(Costs, AreThoseOfTheFirstRankWhereTheyAreMeasured) {
  struct Back {
    ~Back() { sharding::set_cost_model({}); }
  } const back;
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2});
    const sharding::CostModel model = sharding::measured_costs(mesh);
    std::vector<double> mine{model.start, model.hop, model.bytes_per_us};
    const Tensor all = Tensor::empty({4, 3}, DType::kF64);
    group.all_gather_into(all, Tensor::from(mine, {3})).wait();
    const std::vector<double> found = all.to_vector<double>();
    for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i], mine[i % 3]);
    use_measured_costs(mesh);
    group.barrier().wait();  // ranks are threads, and share what each of them has set
    const sharding::CostModel used = sharding::cost_model();
    EXPECT_NEAR(sharding::cost_of(S0, R, {.ranks = 4}, 1e6), used.start + 3 * used.hop + 0.75e6 / used.bytes_per_us,
                1e-9);
    // What was decided before is decided again, by all alike.
    const Tensor x = distribute(op::sample({4, 6}, 1), mesh, {S0, R}, std::nullopt);
    expect_near(full_tensor(add(x, x)), mul(op::sample({4, 6}, 1), 2), 1e-12);
  });
  EXPECT_NE(sharding::cost_model().bytes_per_us, sharding::CostModel{}.bytes_per_us);
  EXPECT_THROW(sharding::set_cost_model({.hop = 0}), InvalidArgument);
}

}  // namespace
}  // namespace chorale
