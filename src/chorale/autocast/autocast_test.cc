#include "chorale/autocast/autocast.h"

#include <gtest/gtest.h>

#include <string_view>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/op/samples.h"

namespace chorale {
namespace {

constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16, kF16 = DType::kF16;
using Values = std::vector<float>;
Values values(const Tensor& x) { return x.to_vector<float>(); }

Tensor parameter(const Shape& sizes, int seed) { return set_requires_grad(to(op::sample(sizes, seed), kF32)); }
Tensor input(const Shape& sizes, int seed) { return to(op::sample(sizes, seed), kF32); }

// Counts the casts that pass, and hands everything on.
class CountingCasts final : public op::Builder {
 public:
  CountingCasts() : Builder(op::Place::kSharding) {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override {
    count += std::string_view(op.name) == "to";
    rest.call(op, in, attrs, out);
  }
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override {
    rest.call_into(op, in, attrs, out);
  }
  int count = 0;
};

// Two layers that share their weight; the loss is f32.
struct Model {
  Tensor weight = parameter({4, 4}, 1), bias = parameter({4}, 2), x = input({3, 4}, 3);

  Tensor loss() const { return sum(square(linear(relu(linear(x, weight, bias)), weight, bias))); }
  // The same with every cast written out.
  Tensor loss_by_hand(DType lower) const {
    const Tensor w = to(weight, lower), b = to(bias, lower);
    return sum(to(square(linear(relu(linear(to(x, lower), w, b)), w, b)), kF32));
  }
  std::vector<Values> gradients() const { return {values(gradient(weight)), values(gradient(bias))}; }
};

TEST(Autocast, GradientsReachF32ParametersAndEqualThoseOfCastingByHand) {
  for (DType lower : {kBF16, kF16}) {
    const Model cast, by_hand;
    Tensor loss;
    {
      const Autocast scope(lower);
      loss = cast.loss();
    }
    EXPECT_EQ(loss.dtype(), kF32);
    backward(loss);
    backward(by_hand.loss_by_hand(lower));
    EXPECT_EQ(gradient(cast.weight).dtype(), kF32);
    EXPECT_EQ(values(loss), values(by_hand.loss_by_hand(lower)));
    EXPECT_EQ(cast.gradients(), by_hand.gradients());
  }
}

TEST(Autocast, BackwardInsideTheScopeIsBackwardOutside) {
  const Model inside, outside;
  Tensor loss;
  {
    const Autocast scope(kBF16);
    backward(inside.loss());
    loss = outside.loss();
  }
  backward(loss);
  EXPECT_EQ(inside.gradients(), outside.gradients());
}

TEST(Autocast, AParameterIsCastOnceInAScope) {
  CountingCasts counting;
  const op::Under counted(op::current_stack().with(counting));
  const Model model;
  counting.count = 0;
  const Autocast scope(kBF16);
  (void)model.loss();  // weight, bias and x to bf16; the square to f32 for its sum
  EXPECT_EQ(counting.count, 4);
  (void)model.loss();  // x is no parameter
  EXPECT_EQ(counting.count, 6);
}

TEST(Autocast, AnUpdateInsideTheScopeIsSeen) {
  const Tensor weight = parameter({2, 2}, 1), x = input({2, 2}, 2);
  const Autocast scope(kBF16);
  const Values before = values(linear(x, weight));
  {
    const NoGrad quiet;
    fill_(weight, 0);
  }
  EXPECT_NE(before, (Values{0, 0, 0, 0}));
  EXPECT_EQ(values(linear(x, weight)), (Values{0, 0, 0, 0}));
}

TEST(Autocast, GradientsAccumulateOverSeveralBackwardPassesInOneScope) {
  const Model twice, once;
  {
    const Autocast scope(kBF16);
    backward(twice.loss());
    backward(twice.loss());
  }
  const Autocast scope(kBF16);
  backward(once.loss());
  auto expected = once.gradients();
  for (Values& list : expected) {
    for (float& value : list) value *= 2;
  }
  EXPECT_EQ(twice.gradients(), expected);
}

TEST(Autocast, ACastMadeWithoutGradientsIsNotUsedWhereTheyAreWanted) {
  const Model model;
  const Autocast scope(kBF16);
  {
    const NoGrad quiet;
    (void)model.loss();
  }
  backward(model.loss());
  EXPECT_TRUE(gradient(model.weight).defined());
}

TEST(Autocast, ScopesNestAndCanBeSwitchedOff) {
  const Tensor weight = parameter({2, 2}, 1), x = input({2, 2}, 2);
  EXPECT_FALSE(autocast_enabled());
  const Autocast outer(kBF16);
  EXPECT_TRUE(autocast_enabled());
  {
    const Autocast inner(kF16);
    EXPECT_EQ(linear(x, weight).dtype(), kF16);
    const Autocast off(kF16, false);
    EXPECT_FALSE(autocast_enabled());
    EXPECT_EQ(linear(x, weight).dtype(), kF32);
    const Autocast on(kBF16);
    EXPECT_EQ(linear(x, weight).dtype(), kBF16);
  }
  EXPECT_EQ(linear(x, weight).dtype(), kBF16);
}

TEST(Autocast, AScopeBelongsToItsThread) {
  const Tensor weight = parameter({2, 2}, 1), x = input({2, 2}, 2);
  const Autocast scope(kBF16);
  DType elsewhere = kBF16;
  std::thread([&] { elsewhere = linear(x, weight).dtype(); }).join();
  EXPECT_EQ(elsewhere, kF32);
}

TEST(Autocast, HooksSeeTheDtypesThatWereComputedIn) {
  const Model model;
  Tensor hidden;
  std::vector<DType> seen;
  {
    const Autocast scope(kBF16);
    hidden = linear(model.x, model.weight);
    on_gradient(hidden, [&](const Tensor& g) {
      seen.push_back(g.dtype());
      // No scope in backward: f32 stays f32.
      seen.push_back(matmul(to(g, kF32), model.weight).dtype());
      return Tensor{};
    });
    on_gradient(model.weight, [&](const Tensor& g) {
      seen.push_back(g.dtype());
      return Tensor{};
    });
    backward(sum(hidden));
  }
  EXPECT_EQ(seen, (std::vector<DType>{kBF16, kF32, kF32}));
}

// A cast of a large vocabulary's logits costs as much as their loss.
TEST(Autocast, LogitsOfALossAreNotCastAndTheLossIsF32) {
  const Tensor target = Tensor::from<int64_t>({0, 3, 1}, {3});
  for (DType lower : {kBF16, kF16}) {
    const Tensor x = to(input({3, 5}, 4), lower), wide = set_requires_grad(to(x, kF32)), logits = set_requires_grad(x);
    CountingCasts counting;
    const op::Under counted(op::current_stack().with(counting));
    const Autocast scope(lower);
    const Tensor loss = cross_entropy(logits, target);
    EXPECT_EQ(counting.count, 0);
    EXPECT_EQ(loss.dtype(), kF32);
    const Tensor expected = cross_entropy(wide, target);
    EXPECT_EQ(values(loss), values(expected));
    backward(loss);
    backward(expected);
    EXPECT_EQ(gradient(logits).dtype(), lower);
    EXPECT_EQ(values(to(gradient(logits), kF32)), values(to(to(gradient(wide), lower), kF32)));
  }
}

TEST(Autocast, ACheckpointIsRunAgainUnderTheScopeOfItsFirstRun) {
  const auto body = [](const Model& model) {
    return [&model](const std::vector<Tensor>& in) {
      return std::vector{linear(relu(linear(in[0], model.weight, model.bias)), model.weight, model.bias)};
    };
  };
  const Model plain, again;
  Tensor first, second;
  {
    const Autocast scope(kBF16);
    first = sum(square(body(plain)({plain.x})[0]));
    second = sum(square(checkpoint(body(again), {again.x})[0]));
  }
  EXPECT_EQ(values(first), values(second));
  backward(first);
  backward(second);
  EXPECT_EQ(plain.gradients(), again.gradients());

  // The other way round: it is recorded without a scope, and run again inside one.
  const Model full, full_again;
  first = sum(square(body(full)({full.x})[0]));
  second = sum(square(checkpoint(body(full_again), {full_again.x})[0]));
  const Autocast scope(kBF16);
  backward(first);
  backward(second);
  EXPECT_EQ(full.gradients(), full_again.gradients());
  EXPECT_NE(full.gradients(), plain.gradients());
}

TEST(Autocast, WritesIntoTensorsKeepTheirDtype) {
  const Tensor x = input({2, 2}, 1), y = input({2, 2}, 2), out = input({2, 2}, 3);
  const Values expected = values(matmul(x, y));
  const Autocast scope(kBF16);
  op::call_into(op::kMatmul, {}, out, x, y);
  EXPECT_EQ(values(out), expected);
}

TEST(Autocast, OnlyThe16BitTypesAreLower) {
  EXPECT_THROW(Autocast{kF32}, InvalidArgument);
  EXPECT_FALSE(autocast_enabled());
}

}  // namespace
}  // namespace chorale
