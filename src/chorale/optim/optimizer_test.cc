// What all optimizers have in common.
#include "chorale/optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/base/parallel_for.h"
#include "chorale/op/samples.h"
#include "chorale/optim/adam.h"
#include "chorale/optim/optim_test_util.h"
#include "chorale/optim/sgd.h"

namespace chorale::optim {
namespace {

Tensor sampled(const Shape& sizes, int seed, DType dtype = DType::kF32) {
  return set_requires_grad(clone(to(op::sample(sizes, seed), dtype)));
}

// A small network of two layers, trained on numbers made by a formula.
struct Problem {
  Tensor w1, b1, w2, x, y;
  explicit Problem(DType dtype = DType::kF32)
      : w1(sampled({5, 7}, 1, dtype)),
        b1(sampled({7}, 2, dtype)),
        w2(sampled({7, 3}, 3, dtype)),
        x(to(op::sample({4, 5}, 4), dtype)),
        y(to(op::sample({4, 3}, 5), dtype)) {}
  NamedTensors named() const { return {{"w1", w1}, {"b1", b1}, {"w2", w2}}; }
  Tensor loss() const { return mean(square(matmul(tanh(add(matmul(x, w1), b1)), w2) - y)); }
  Values all() const {
    Values result;
    for (const Tensor& t : {w1, b1, w2}) {
      for (double v : values(t)) result.push_back(v);
    }
    return result;
  }
};

TEST(Optimizer, AStepMovesEachParameterAgainstItsGradient) {
  const Tensor a = leaf({1, 2}), b = leaf({3}), unused = leaf({4});
  Sgd optimizer({{"a", a}, {"b", b}, {"unused", unused}}, {.lr = 0.5});
  backward(sum(a * a) + sum(b));
  optimizer.step();
  EXPECT_EQ(values(a), (Values{0, 0}));
  EXPECT_EQ(values(b), (Values{2.5}));
  EXPECT_EQ(values(unused), (Values{4}));
}

TEST(Optimizer, GroupsHaveTheirOwnOptions) {
  const Tensor a = leaf({1}), b = leaf({1});
  Sgd optimizer(std::vector<ParameterGroup<SgdOptions>>{{{{"a", a}}, {.lr = 0.5}}, {{{"b", b}}, {.lr = 0.25}}});
  backward(sum(a) + sum(b));
  optimizer.step();
  EXPECT_EQ(values(a), (Values{0.5}));
  EXPECT_EQ(values(b), (Values{0.75}));
  optimizer.set_lr(1, 1);
  EXPECT_EQ(optimizer.options(1).lr, 1);
  EXPECT_EQ(optimizer.options(0).lr, 0.5);
  optimizer.set_lr(2);
  EXPECT_EQ(optimizer.lr(0), 2);
  EXPECT_EQ(optimizer.lr(1), 2);
}

TEST(Optimizer, ZeroGradForgetsGradientsOrClearsThemInPlace) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  backward(sum(a));
  const Tensor before = gradient(a);
  optimizer.zero_grad(ZeroGrad::kInPlace);
  EXPECT_TRUE(gradient(a).is(before));
  EXPECT_EQ(values(before), (Values{0}));
  optimizer.zero_grad();
  EXPECT_FALSE(gradient(a).defined());
}

TEST(Optimizer, AClosureRunsOnceWithGradientsAndItsLossIsReturned) {
  const Tensor a = leaf({3});
  Sgd optimizer({{"a", a}}, {.lr = 1});
  const NoGrad outside;
  const Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    const Tensor result = sum(a);
    backward(result);
    return result;
  });
  EXPECT_EQ(loss.item<double>(), 3);
  EXPECT_EQ(values(a), (Values{2}));
}

TEST(Optimizer, TheNumberOfThreadsAndTheCutIntoParametersDoNotChangeABit) {
  const auto train = [](int threads, const std::vector<int64_t>& cut) {
    const int before = thread_count();
    set_thread_count(threads);
    NamedTensors named;
    const Tensor whole = op::sample({200'000}, 1), slopes = op::sample({200'000}, 2);
    for (size_t i = 0; i + 1 < cut.size(); ++i) {
      const Tensor part = set_requires_grad(clone(to(slice(whole, 0, cut[i], cut[i + 1]), DType::kF32)));
      set_gradient(part, clone(to(slice(slopes, 0, cut[i], cut[i + 1]), DType::kF32)));
      named.emplace_back(concat("p", i), part);
    }
    AdamW optimizer(named);
    for (int step = 0; step < 3; ++step) optimizer.step();
    set_thread_count(before);
    std::vector<float> result;
    for (const auto& [name, part] : named) {
      for (float v : part.to_vector<float>()) result.push_back(v);
    }
    return result;
  };
  const auto expected = train(1, {0, 200'000});
  EXPECT_EQ(train(2, {0, 200'000}), expected);
  EXPECT_EQ(train(3, {0, 1, 1, 40'000, 140'003, 200'000}), expected);
}

TEST(Optimizer, UpdatingInBackwardGivesTheBitsOfStep) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const Problem plain(dtype), early(dtype);
    AdamW slow(plain.named(), {.lr = 0.05}), fast(early.named(), {.lr = 0.05});
    fast.update_in_backward();
    for (int step = 0; step < 5; ++step) {
      slow.zero_grad();
      backward(plain.loss());
      slow.step();
      fast.zero_grad();
      backward(early.loss());
      EXPECT_FALSE(gradient(early.w1).defined());
      fast.step();
    }
    EXPECT_EQ(plain.all(), early.all());
    EXPECT_NE(plain.all(), Problem(dtype).all());
  }
}

TEST(Optimizer, UpdatingInBackwardHandlesAParameterUsedTwice) {
  const Tensor w = sampled({2, 2}, 1), same = sampled({2, 2}, 1), x = to(op::sample({2, 2}, 2), DType::kF32);
  Sgd late({{"w", w}}, {.lr = 0.1}), early({{"w", same}}, {.lr = 0.1});
  early.update_in_backward();
  backward(sum(matmul(tanh(matmul(x, w)), transpose(w, 0, 1))));
  late.step();
  backward(sum(matmul(tanh(matmul(x, same)), transpose(same, 0, 1))));
  EXPECT_EQ(values(w), values(same));
}

TEST(Optimizer, UpdatingInBackwardRefusesWhatNeedsAllGradients) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  optimizer.update_in_backward();
  EXPECT_MESSAGE(StateError, "closure", optimizer.step([&] { return sum(a); }));
  EXPECT_MESSAGE(InvalidArgument, "step() was given an empty function", optimizer.step(nullptr));
  backward(sum(a));
  EXPECT_MESSAGE(StateError, "a got a second gradient before step()", backward(sum(a)));
  optimizer.step();
  backward(sum(a));

  const Tensor flat = Tensor::from<double>({1, 2}, {2});
  const Tensor left = flat.view_as({1}, {1}, 0), right = flat.view_as({1}, {1}, 1);
  set_requires_grad(left);
  set_requires_grad(right);
  Sgd shared({{"left", left}, {"right", right}});
  EXPECT_MESSAGE(InvalidArgument, "right shares its memory", shared.update_in_backward());
}

TEST(Optimizer, UpdatingInBackwardLeavesAloneWhatGoesToAnotherSink) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}}, {.lr = 1});
  optimizer.update_in_backward();
  autograd::GradientMap map;
  backward(sum(a * 3), {}, {.sink = &map});
  EXPECT_EQ(values(a), (Values{1}));
  EXPECT_EQ(values(map.gradient(a)), (Values{3}));
  backward(sum(a * 3));
  EXPECT_EQ(values(a), (Values{-2}));
}

TEST(Optimizer, HooksGoWithTheOptimizer) {
  const Tensor a = leaf({1});
  {
    Sgd optimizer({{"a", a}}, {.lr = 1});
    optimizer.update_in_backward();
  }
  backward(sum(a));
  EXPECT_EQ(values(a), (Values{1}));
  EXPECT_EQ(values(gradient(a)), (Values{1}));
}

TEST(Optimizer, BackwardNoticesThatAStepOverwroteAWeightItNeeds) {
  const Tensor a = leaf({2}), b = leaf({3});
  Sgd optimizer({{"a", a}, {"b", b}});
  const Tensor loss = sum(a * b);
  backward(loss, {}, {.retain_graph = true});
  optimizer.step();
  EXPECT_MESSAGE(StateError, "overwritten in place by update_sgd", backward(loss));
}

TEST(Optimizer, HalfPrecisionParametersKeepTheirFineSteps) {
  // 1 + 0.001 is not a bf16 number: without a master copy the weight would never move.
  const Tensor w = set_requires_grad(to(Tensor::from<double>({1}, {1}), DType::kBF16));
  Sgd optimizer({{"w", w}}, {.lr = 0.001});
  for (int step = 0; step < 1000; ++step) {
    set_gradient(w, to(Tensor::from<double>({-1}, {1}), DType::kBF16));
    optimizer.step();
  }
  EXPECT_EQ(w.item<double>(), 2);
  NamedTensors state = optimizer.state_dict();
  EXPECT_NEAR(at(state, "state/w/master").item<double>(), 2, 1e-4);
}

TEST(Optimizer, AStateComesBackByNameWhateverTheOrder) {
  const Problem first;
  AdamW before(first.named(), {.lr = 0.05, .amsgrad = true});
  const auto train = [](const Problem& problem, Optimizer& optimizer, int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      backward(problem.loss());
      optimizer.step();
    }
  };
  train(first, before, 3);

  Problem second;
  {
    const NoGrad quiet;
    copy_(second.w1, first.w1), copy_(second.b1, first.b1), copy_(second.w2, first.w2);
  }
  AdamW after({{"w2", second.w2}, {"w1", second.w1}, {"b1", second.b1}}, {.lr = 7});
  after.load_state_dict(before.state_dict());
  EXPECT_EQ(after.options().lr, 0.05);
  EXPECT_TRUE(after.options().amsgrad);
  train(first, before, 3);
  train(second, after, 3);
  EXPECT_EQ(first.all(), second.all());
}

TEST(Optimizer, ASavedStateDoesNotChangeWithLaterSteps) {
  const Tensor a = leaf({1});
  Adam optimizer({{"a", a}});
  set_gradient(a, Tensor::from<double>({1}, {1}));
  optimizer.step();
  NamedTensors saved = optimizer.state_dict();
  const double before = at(saved, "state/a/exp_avg").item<double>();
  optimizer.step();
  EXPECT_EQ(at(saved, "state/a/exp_avg").item<double>(), before);
}

TEST(Optimizer, AStateIsCompleteAfterAChangeOfOptionsOrDtype) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  set_gradient(a, Tensor::from<double>({1}, {1}));
  optimizer.step();
  optimizer.set_option(0, "momentum", 0.5);
  set_gradient(a, {});
  a.set_data(to(detach(a), DType::kBF16));
  NamedTensors saved = optimizer.state_dict();
  EXPECT_EQ(values(at(saved, "state/a/momentum_buffer")), (Values{0}));
  EXPECT_EQ(values(at(saved, "state/a/master")), values(a));
  Sgd other({{"a", a}});
  other.load_state_dict(saved);
  EXPECT_EQ(other.options().momentum, 0.5);
}

TEST(Optimizer, AStateOfOtherParametersIsRefusedAndNothingChanges) {
  const Tensor a = leaf({1}), b = leaf({1, 2});
  Adam one({{"a", a}}, {.lr = 0.5}), other({{"b", b}});
  set_gradient(a, detach(a)), set_gradient(b, detach(b));
  one.step(), other.step();
  const NamedTensors own = one.state_dict();
  EXPECT_MESSAGE(InvalidArgument, "missing: state/a/step", one.load_state_dict(other.state_dict()));
  EXPECT_MESSAGE(InvalidArgument, "unexpected: state/b/exp_avg", one.load_state_dict(other.state_dict()));
  EXPECT_EQ(one.lr(), 0.5);
  NamedTensors wrong = own;
  at(wrong, "state/a/exp_avg") = b;
  EXPECT_MESSAGE(InvalidArgument, "should have shape [1], and has [2]", one.load_state_dict(wrong));
  wrong = own;
  at(wrong, "groups/0/lr") = Tensor::scalar(-1.0, DType::kF64);
  EXPECT_MESSAGE(InvalidArgument, "lr must be at least 0", one.load_state_dict(wrong));
  EXPECT_EQ(one.lr(), 0.5);
}

TEST(Optimizer, AnyLayoutOfAGradientOrAParameterWorks) {
  const Tensor straight = sampled({3, 4}, 1, DType::kF64);
  const Tensor turned = set_requires_grad(Tensor::empty_strided({3, 4}, {1, 3}, DType::kF64));
  {
    const NoGrad quiet;
    copy_(turned, straight);
  }
  const Tensor slopes = op::sample({4, 3}, 2);
  Adam optimizer({{"straight", straight}, {"turned", turned}});
  for (int step = 0; step < 2; ++step) {
    set_gradient(straight, transpose(slopes, 0, 1));
    set_gradient(turned, contiguous(transpose(slopes, 0, 1)));
    optimizer.step();
  }
  EXPECT_EQ(values(straight), values(turned));
  EXPECT_NE(values(straight), values(sampled({3, 4}, 1, DType::kF64)));
}

TEST(Optimizer, StatesFollowAParameterToAnotherDtype) {
  const auto train = [](const std::vector<DType>& dtypes) {
    const Tensor w = set_requires_grad(Tensor::from<double>({1, 2, 3}, {3}));
    Adam optimizer({{"w", w}}, {.lr = 0.125});
    for (DType dtype : dtypes) {
      set_gradient(w, {});
      w.set_data(to(detach(w), dtype));
      set_gradient(w, to(Tensor::from<double>({1, -2, 0.5}, {3}), dtype));
      optimizer.step();
    }
    return values(w);
  };
  const Values expected = train({DType::kF64, DType::kF64, DType::kF64, DType::kF64});
  const Values mixed = train({DType::kF32, DType::kF64, DType::kBF16, DType::kF32});
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(mixed[i], expected[i], 0.02);
  EXPECT_LT(expected[0], 0.6);
}

TEST(Optimizer, ASparseGradientMovesItsRowsOnly) {
  const Tensor table = sampled({5, 2}, 1, DType::kF64);
  const Values before = values(table);
  Sgd optimizer({{"table", table}}, {.lr = 1});
  backward(sum(embedding(Tensor::from<int64_t>({3, 1, 3}, {3}), table, {}, true)));
  ASSERT_TRUE(gradient(table).is_sparse());
  optimizer.step();
  Values expected = before;
  for (size_t i : {2u, 3u}) expected[i] -= 1;
  for (size_t i : {6u, 7u}) expected[i] -= 2;
  EXPECT_EQ(values(table), expected);

  Adam dense({{"table", table}});
  EXPECT_MESSAGE(InvalidArgument, "table has a sparse gradient", dense.step());
}

TEST(Optimizer, BadParametersAndOptionsAreNamed) {
  const Tensor a = leaf({1}), whole = Tensor::from<int64_t>({1}, {1});
  EXPECT_MESSAGE(InvalidArgument, "group 0 has no parameters", Sgd(NamedTensors{}));
  EXPECT_MESSAGE(InvalidArgument, "two parameters are called a", Sgd(NamedTensors{{"a", a}, {"a", leaf({2})}}));
  EXPECT_MESSAGE(InvalidArgument, "b is given twice", Sgd(NamedTensors{{"a", a}, {"b", a}}));
  EXPECT_MESSAGE(InvalidArgument, "i is i64", Sgd(NamedTensors{{"i", whole}}));
  EXPECT_MESSAGE(InvalidArgument, "only leaves", Sgd(NamedTensors{{"y", a + a}}));
  EXPECT_MESSAGE(InvalidArgument, "n is undefined", Sgd(NamedTensors{{"n", Tensor{}}}));
  const NamedTensors named{{"a", a}};
  EXPECT_MESSAGE(InvalidArgument, "lr must be at least 0, not -1", Sgd(named, {.lr = -1}));
  EXPECT_MESSAGE(InvalidArgument, "nesterov needs a momentum", Sgd(named, {.nesterov = true}));
  EXPECT_MESSAGE(InvalidArgument, "beta2 must be in [0, 1), not 1", Adam(named, {.beta2 = 1}));
  Sgd optimizer(named);
  EXPECT_MESSAGE(InvalidArgument, "no group 1", optimizer.set_lr(1, 0.1));
  EXPECT_MESSAGE(InvalidArgument, "has no option beta1", optimizer.option(0, "beta1"));
  EXPECT_MESSAGE(InvalidArgument, "lr must be", optimizer.set_lr(std::nan("")));
  set_gradient(a, Tensor::from<float>({1}, {1}));
  EXPECT_MESSAGE(InvalidArgument, "the gradient of a is f32 [1]; expected f64", optimizer.step());
}

}  // namespace
}  // namespace chorale::optim
