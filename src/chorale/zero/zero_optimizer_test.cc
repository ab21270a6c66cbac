#include "chorale/zero/zero_optimizer.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/zero/partition.h"
#include "chorale/zero/zero_test_util.h"

namespace chorale::zero {
namespace {

using optim::Adam;
using optim::AdamOptions;
using optim::AdamW;
using optim::AdamWOptions;
using optim::Sgd;
using optim::SgdOptions;
using ZeroSgd = ZeroOptimizer<Sgd, SgdOptions>;

// What averaging over ranks would give: the same on every rank, another one in each step.
void set_gradients(const NamedTensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& x = parameters[i].second;
    set_gradient(x, op::sample(x.sizes(), 100 * step + static_cast<int>(i)));
  }
}
TEST(Partition, LargeOnesGoFirstAndTiesToTheLowestRank) {
  std::vector<int64_t> totals(2);
  EXPECT_EQ(owners_of(std::vector<int64_t>{2, 9, 4, 4}, totals), (std::vector<int>{1, 0, 1, 1}));
  EXPECT_EQ(totals, (std::vector<int64_t>{9, 10}));
  // The next group goes on from there: 3 makes 12 and 10, 2 makes 12 and 12, and then both have as much.
  EXPECT_EQ(owners_of(std::vector<int64_t>{1, 3, 2}, totals), (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(totals, (std::vector<int64_t>{13, 12}));
}

// spec: test_sharding
TEST(ZeroOptimizer, StatesAreSharedOutByElements) {
  for (const int ranks : comm::sizes_to_run({1, 2, 3})) {
    comm::run_ranks(ranks, [&](comm::Group& group) {
      std::vector<int64_t> sizes;
      for (const int64_t size : {9, 7, 5, 3}) sizes.insert(sizes.end(), static_cast<size_t>(ranks), size);
      const ZeroSgd optimizer({{parameters_of(sizes), {}}}, group);
      EXPECT_EQ(optimizer.elems_by_rank(), std::vector<int64_t>(static_cast<size_t>(ranks), 24));
    });
  }
}

// spec: test_add_param_group
TEST(ZeroOptimizer, GroupsMayBeAddedLater) {
  comm::run_ranks(3, [](comm::Group& group) {
    std::vector<int64_t> sizes;
    for (const int64_t size : {9, 7, 5, 3}) sizes.insert(sizes.end(), 3, size);
    NamedTensors parameters = parameters_of(sizes);
    const NamedTensors last{parameters.back()};
    parameters.pop_back();
    ZeroSgd optimizer({{parameters, {}}}, group);
    optimizer.add_group({last, {}});
    EXPECT_EQ(optimizer.elems_by_rank(), (std::vector<int64_t>{24, 24, 24}));
    EXPECT_EQ(optimizer.group_count(), 2u);
    // Frozen parameters count, too; one rank has nothing of the second group.
    NamedTensors mixed = parameters_of({100, 3, 5, 2, 6, 4});
    set_requires_grad(mixed[0].second, false);
    ZeroSgd other({{mixed, {}}}, group);
    other.add_group({{{"late", set_requires_grad(op::sample({3}))}}, {}});
    EXPECT_EQ(other.group_count(), 2u);
    EXPECT_EQ(other.elems_by_rank()[0], 100);
    set_gradients({mixed.begin() + 1, mixed.end()}, 1);
    other.step();
  });
}

// spec: test_step
TEST(ZeroOptimizer, AStepIsThatOfThePlainOptimizer) {
  comm::run_ranks(4, [](comm::Group& group) {
    const Tensor weight = set_requires_grad(Tensor::from<double>({1}, {1, 1})),
                 bias = set_requires_grad(Tensor::from<double>({2}, {1}));
    const Tensor x = Tensor::from<double>({group.rank() + 1.0}, {1});
    ZeroSgd optimizer({{{{"weight", weight}, {"bias", bias}}, {.lr = 0.01}}}, group);
    backward({linear(x, weight, bias)}, {x});
    for (const Tensor& p : {weight, bias}) group.all_reduce(gradient(p), Reduce::kAverage).wait();
    optimizer.step();
    EXPECT_NEAR(weight.item<double>(), 0.925, 1e-12);
    EXPECT_NEAR(bias.item<double>(), 1.975, 1e-12);
  });
}

// Steps beside a plain optimizer, with a state that is saved and loaded in the middle.
template <class Optim, class Options>
void expect_parity(const comm::Group& group, const Options& options, bool bucket_views) {
  const NamedTensors mine = parameters_of({8, 3, 5, 1, 6}), plain = parameters_of({8, 3, 5, 1, 6});
  using Zero = ZeroOptimizer<Optim, Options>;
  auto optimizer = std::make_unique<Zero>(std::vector<optim::ParameterGroup<Options>>{{mine, options}}, group,
                                          ZeroOptions{bucket_views});
  Optim reference(plain, options);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      optimizer->consolidate_state_dict(0);
      std::vector<comm::Value> state(1);
      if (group.rank() == 0) {
        comm::Map map;
        for (const auto& [key, x] : optimizer->state_dict()) map[key] = x;
        state[0] = map;
        EXPECT_EQ(map.size(), reference.state_dict().size());
      }
      comm::broadcast_object_list(group, state, 0);
      NamedTensors loaded;
      for (const auto& [key, x] : state[0].as<comm::Map>()) loaded.emplace_back(key, x.template as<Tensor>());
      Options changed = options;
      changed.lr *= 7;  // what was saved wins
      optimizer = std::make_unique<Zero>(std::vector<optim::ParameterGroup<Options>>{{mine, changed}}, group,
                                         ZeroOptions{bucket_views});
      optimizer->load_state_dict(loaded);
      EXPECT_EQ(optimizer->lr(), options.lr);
    }
    if (step == 4) {
      optimizer->set_lr(0.5 * options.lr);
      reference.set_lr(0.5 * options.lr);
    }
    set_gradients(mine, step);
    set_gradients(plain, step);
    optimizer->step();
    reference.step();
    expect_equal(mine, plain);
  }
}

// spec: test_local_optimizer_parity, test_collect_shards
TEST(ZeroOptimizer, EqualsThePlainOptimizerInEachStep) {
  comm::run_ranks(3, [](comm::Group& group) {
    for (const bool views : {false, true}) {
      expect_parity<Sgd, SgdOptions>(group, {.lr = 0.1, .momentum = 0.99}, views);
      expect_parity<Adam, AdamOptions>(group, {.lr = 0.1}, views);
      expect_parity<AdamW, AdamWOptions>(group, {.lr = 0.1, .weight_decay = 0.1}, views);
    }
  });
}

// spec: test_multiple_param_groups
TEST(ZeroOptimizer, GroupsWithOptionsOfTheirOwn) {
  comm::run_ranks(2, [](comm::Group& group) {
    const auto make = [] { return parameters_of({50, 10, 100, 10, 50, 5}); };
    const NamedTensors up_front = make(), added = make(), plain = make();
    const auto half = [](const NamedTensors& p, size_t which) {
      NamedTensors list;
      for (size_t i = which; i < p.size(); i += 2) list.push_back(p[i]);
      return list;
    };
    const AdamWOptions decayed{.lr = 0.01, .weight_decay = 0.01}, other{.lr = 0.01, .weight_decay = 0};
    using Zero = ZeroOptimizer<AdamW, AdamWOptions>;
    Zero first({{half(up_front, 0), other}, {half(up_front, 1), decayed}}, group);
    Zero second({{half(added, 0), other}}, group);
    second.add_group({half(added, 1), decayed});
    AdamW reference({{half(plain, 0), other}, {half(plain, 1), decayed}});
    for (int step = 0; step < 3; ++step) {
      for (const NamedTensors& p : {up_front, added, plain}) set_gradients(p, step);
      first.step();
      second.step();
      reference.step();
      expect_equal(up_front, plain);
      expect_equal(added, plain);
    }
  });
}

// spec: test_state_dict
TEST(ZeroOptimizer, OneRankHasAllOfTheState) {
  comm::run_ranks(1, [](comm::Group& group) {
    const Tensor x = set_requires_grad(Tensor::from<double>({1}, {1}));
    ZeroSgd optimizer({{{{"x", x}}, {.lr = 0.1, .momentum = 0.9}}}, group);
    set_gradient(x, Tensor::from<double>({1}, {1}));
    optimizer.step();
    EXPECT_NEAR(x.item<double>(), 0.9, 1e-15);
    EXPECT_NE(message_of<StateError>([&] { optimizer.state_dict(); }).find("consolidate_state_dict"),
              std::string::npos);
    optimizer.consolidate_state_dict();
    ZeroSgd other({{{{"x", x}}, {.lr = 0.01}}}, group);
    NamedTensors saved = optimizer.state_dict();
    other.load_state_dict(saved);
    EXPECT_EQ(other.lr(), 0.1);
    set_gradient(x, Tensor::from<double>({1}, {1}));
    other.step();
    EXPECT_NEAR(x.item<double>(), 0.71, 1e-15);
    other.consolidate_state_dict();
    for (const auto& [key, state] : other.state_dict()) {
      if (key != "state/x/momentum_buffer") continue;
      EXPECT_NEAR(state.item<double>(), 1.9, 1e-15);
    }
  });
}

// spec: test_nondefault_process_group
TEST(ZeroOptimizer, WorksInAPartOfTheWorld) {
  comm::run_ranks(4, [](comm::Group& world) {
    const comm::Group even = world.new_group({0, 2});
    if (!even.is_member()) return;
    expect_parity<Sgd, SgdOptions>(even, {.lr = 0.1, .momentum = 0.9}, false);
    const NamedTensors p = parameters_of({4, 4});
    ZeroSgd optimizer({{p, {.momentum = 0.9}}}, even);
    set_gradients(p, 1);
    optimizer.step();
    optimizer.consolidate_state_dict(2);
    if (world.rank() == 2) {
      EXPECT_FALSE(optimizer.state_dict().empty());
    } else {
      EXPECT_THROW(optimizer.state_dict(), StateError);
    }
  });
}

// spec: test_step_with_closure
TEST(ZeroOptimizer, AClosureComputesTheLoss) {
  comm::run_ranks(2, [](comm::Group& group) {
    for (const bool views : {false, true}) {
      const NamedTensors p = parameters_of({4, 2});
      ZeroSgd optimizer({{p, {.lr = 0.5}}}, group, {.bucket_views = views});
      const double before = sum(abs(p[0].second)).item<double>();
      const std::vector<double> signs = sign(p[0].second).to_vector<double>();
      std::vector<double> expected = p[0].second.to_vector<double>();
      for (size_t i = 0; i < expected.size(); ++i) expected[i] -= 0.5 * signs[i];
      const Tensor loss = optimizer.step([&] {
        optimizer.zero_grad();
        const Tensor l1 = sum(abs(p[0].second));
        backward(l1);
        return l1;
      });
      EXPECT_EQ(loss.item<double>(), before);
      EXPECT_EQ(p[0].second.to_vector<double>(), expected);
    }
  });
}

// spec: test_constructor
TEST(ZeroOptimizer, TakesParametersInGroups) {
  comm::run_ranks(2, [](comm::Group& group) {
    const NamedTensors some = parameters_of({4, 3}), more = parameters_of({2});
    const ZeroSgd one({{some, {.lr = 0.1}}}, group);
    EXPECT_EQ(one.group_count(), 1u);
    EXPECT_EQ(one.parameters().size(), 2u);
    const ZeroSgd two({{some, {.lr = 0.1}}, {more, {.lr = 0.5}}}, group);
    EXPECT_EQ(two.group_count(), 2u);
    EXPECT_EQ(two.lr(1), 0.5);
    EXPECT_THROW(ZeroSgd({}, group), InvalidArgument);
    EXPECT_THROW(ZeroSgd({{{}, {}}}, group), InvalidArgument);
    EXPECT_THROW(ZeroSgd({{{{"nothing", Tensor()}}, {}}}, group), InvalidArgument);
  });
}

// An optimizer of somebody else's: every step halves its rate, and can be told something.
struct HalvingSgd {
  explicit HalvingSgd(const std::vector<optim::ParameterGroup<SgdOptions>>& groups) : inner(groups) {}
  void step() {
    inner.step();
    SgdOptions next = inner.options(0);
    next.lr /= 2;
    inner.set_options(0, next);
  }
  void step(std::vector<int>& told) {
    step();
    told.push_back(5);
  }
  const SgdOptions& options(size_t group) const { return inner.options(group); }
  void set_options(size_t group, const SgdOptions& options) { inner.set_options(group, options); }
  NamedTensors state_dict() const { return inner.state_dict(); }
  void load_state_dict(const NamedTensors& state) { inner.load_state_dict(state); }
  std::vector<Tensor> parameters() const { return inner.parameters(); }
  Sgd inner;
};

// spec: test_lr_scheduler, test_step_with_kwargs, test_step_with_extra_inner_key, test_step_without_closure
// spec: test_zero_grad
TEST(ZeroOptimizer, OptionsFlowInAndOut) {
  comm::run_ranks(2, [](comm::Group& group) {
    const NamedTensors mine = parameters_of({4, 3, 5}), theirs = parameters_of({4, 3, 5});
    {
      ZeroSgd zero({{mine, {.lr = 0.1}}}, group);
      Sgd plain(theirs, {.lr = 0.1});
      const optim::Schedule fall = optim::scaled_by([](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
      optim::Scheduler scheduler(plain, fall);
      for (int step = 0; step < 4; ++step) {
        set_gradients(mine, step);
        set_gradients(theirs, step);
        zero.step();
        plain.step();
        scheduler.step();
        zero.set_lr(fall(step + 1, 0.1));
        EXPECT_EQ(zero.lr(), plain.lr());
        expect_equal(mine, theirs);
      }
      zero.zero_grad();
      for (const auto& [name, x] : mine) EXPECT_FALSE(gradient(x).defined()) << name;
    }
    ZeroOptimizer<HalvingSgd, SgdOptions> halving({{mine, {.lr = 0.1}}}, group);
    Sgd plain(theirs, {.lr = 0.1});
    std::vector<int> told;
    for (int step = 0; step < 3; ++step) {
      set_gradients(mine, step);
      set_gradients(theirs, step);
      step == 1 ? halving.step_with(told) : halving.step();
      plain.set_lr(0.1 / (1 << step));
      plain.step();
      expect_equal(mine, theirs);
      EXPECT_EQ(halving.lr(), 0.1 / (2 << step)) << "what the step changed is seen outside";
    }
    EXPECT_EQ(told, std::vector<int>{5});
    // What is changed outside counts inside, too.
    halving.set_lr(1);
    plain.set_lr(1);
    set_gradients(mine, 9);
    set_gradients(theirs, 9);
    halving.step();
    plain.step();
    expect_equal(mine, theirs);
  });
}

// spec: test_same_dense_param_type
TEST(ZeroOptimizer, RefusesWhatItCannotShareOut) {
  comm::run_ranks(1, [](comm::Group& group) {
    NamedTensors mixed = parameters_of({4});
    mixed.emplace_back("half", set_requires_grad(full({2}, 1, DType::kF32)));
    EXPECT_EQ(message_of<InvalidArgument>([&] {
                ZeroSgd({{mixed, {}}}, group);
              }),
              "[ZeroOptimizer] parameter half is f32, and the first one is f64; all must have one dtype");
    EXPECT_THROW(ZeroSgd({}, group), InvalidArgument);
    EXPECT_THROW(ZeroSgd({{{}, {}}}, group), InvalidArgument);
    const Tensor sparse = Tensor::sparse_coo(Tensor::from<int64_t>({1}, {1, 1}), full({1}, 1, DType::kF64), {3}, true);
    EXPECT_THROW(ZeroSgd({{{{"sparse", sparse}}, {}}}, group), InvalidArgument);
  });
}

}  // namespace
}  // namespace chorale::zero
