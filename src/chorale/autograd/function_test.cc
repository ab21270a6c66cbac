#include <gtest/gtest.h>

#include <map>
#include <string>

#include "chorale/autograd/checkpoint.h"
#include "chorale/autograd/leaf_test_util.h"
#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale {
namespace {

struct Cube final : Function {
  explicit Cube(double scale_) : scale(scale_) {}
  const char* name() const override { return "cube"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    save_for_backward({in[0]});
    return {mul(mul(mul(in[0], in[0]), in[0]), scale)};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const Tensor& x = saved()[0];
    return {mul(dout[0], mul(mul(x, x), 3 * scale))};
  }
  double scale;
};

TEST(Function, GradientWrittenByHand) {
  const Tensor x = leaf({2});
  backward(sum(apply<Cube>({x}, 5.0)[0]));
  EXPECT_EQ(values(gradient(x)), (Values{60}));
}

TEST(Function, CanBeDifferentiatedTwice) {
  const Tensor x = leaf({2});
  const Tensor g = grad({sum(apply<Cube>({x}, 1.0)[0])}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(values(grad({sum(g)}, {x})[0]), (Values{12}));
}

struct MinMax final : Function {
  const char* name() const override { return "min_max"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    Tensor low = mul(in[0], -1), high = mul(in[0], 2), flag = mul(in[0], 0);
    mark_non_differentiable(flag);
    return {low, high, flag};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    EXPECT_EQ(dout.size(), 3u);
    EXPECT_EQ(values(dout[0]), (Values{0}));  // no gradient arrived: zeros
    return {sub(mul(dout[1], 2), dout[0])};
  }
};

TEST(Function, SeveralOutputsSomeWithoutGradient) {
  const Tensor x = leaf({1});
  const auto out = apply<MinMax>({x});
  EXPECT_TRUE(requires_grad(out[0]));
  EXPECT_FALSE(requires_grad(out[2]));
  backward(sum(out[1]));
  EXPECT_EQ(values(gradient(x)), (Values{2}));
}

TEST(Function, ASavedValueThatWasOverwrittenIsAnError) {
  const Tensor x = leaf({2});
  const Tensor y = mul(x, 1);
  const Tensor z = apply<Cube>({y}, 1.0)[0];
  add_(y, 1);
  EXPECT_THROW(backward(sum(z)), StateError);
}

TEST(Function, WrongNumberOfGradientsIsAnError) {
  struct Bad final : Function {
    const char* name() const override { return "bad"; }
    std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {mul(in[0], in[1])}; }
    std::vector<Tensor> backward(const std::vector<Tensor>& dout) override { return {dout[0]}; }
  };
  const Tensor x = leaf({2});
  EXPECT_THROW(backward(sum(apply<Bad>({x, x})[0])), InvalidArgument);
}

TEST(SavedTensorHooks, PackAndUnpackSeeEverySavedValue) {
  const Tensor x = leaf({2, 3});
  int packed = 0, unpacked = 0;
  Tensor y;
  {
    const SavedTensorHooksScope scope({[&](const Tensor& value) {
                                         ++packed;
                                         return std::make_shared<Tensor>(clone(value));
                                       },
                                       [&](const std::shared_ptr<void>& held) {
                                         ++unpacked;
                                         return *std::static_pointer_cast<Tensor>(held);
                                       }});
    y = sum(mul(x, x));
  }
  EXPECT_EQ(packed, 2);
  backward(y);
  EXPECT_EQ(unpacked, 2);
  EXPECT_EQ(values(gradient(x)), (Values{4, 6}));
}

TEST(Checkpoint, GivesTheSameGradientsAndRunsTheFunctionTwice) {
  const Tensor x = leaf({0.5, 1.5}), w = leaf({2, 3});
  int runs = 0;
  const auto block = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    ++runs;
    return {exp(mul(in[0], w))};
  };
  const Tensor plain = sum(mul(block({x})[0], x));
  backward(plain);
  const Values dx = values(gradient(x)), dw = values(gradient(w));
  set_gradient(x, {});
  set_gradient(w, {});
  runs = 0;
  const Tensor saving = sum(mul(checkpoint(block, {x})[0], x));
  EXPECT_EQ(saving.item<double>(), plain.item<double>());
  EXPECT_EQ(runs, 1);
  backward(saving);
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(values(gradient(x)), dx);
  EXPECT_EQ(values(gradient(w)), dw);
}

TEST(Checkpoint, ReplaysRandomNumbersAndLeavesTheStreamWhereItWas) {
  const Tensor x = leaf({1, 1});
  std::vector<uint64_t> offsets;
  const auto block = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    offsets.push_back(default_generator().take(4).offset);
    return {exp(in[0])};
  };
  const Tensor y = sum(checkpoint(block, {x})[0]);
  default_generator().take(4);
  const auto before = default_generator().state();
  backward(y);
  ASSERT_EQ(offsets.size(), 2u);
  EXPECT_EQ(offsets[0], offsets[1]);
  EXPECT_EQ(default_generator().state().offset, before.offset);
}

TEST(Checkpoint, HooksInsideFireOnceAndSecondDerivativesWork) {
  const Tensor x = leaf({2});
  int fired = 0;
  after_accumulate(x, [&](const Tensor&) { ++fired; });
  const auto cube = [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    return {mul(mul(in[0], in[0]), in[0])};
  };
  backward(sum(checkpoint(cube, {x})[0]));
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(values(gradient(x)), (Values{12}));
  const Tensor g = grad({sum(checkpoint(cube, {x})[0])}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(values(grad({sum(g)}, {x})[0]), (Values{12}));
}

TEST(Checkpoint, KeepsOnlyItsInputsBetweenForwardAndBackward) {
  const Tensor x = set_requires_grad(full({1000, 1000}, 0.1));
  const auto chain = [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor y = in[0];
    for (int i = 0; i < 8; ++i) y = tanh(y);
    return {y};
  };
  const size_t before = cpu_allocator().stats().current_bytes;
  const Tensor y = checkpoint(chain, {x})[0];
  const size_t kept = cpu_allocator().stats().current_bytes - before;
  EXPECT_LT(kept, size_t{2} * 4'000'000 + 100'000);  // the result alone; eight would be 32 MB
  backward(sum(y));
  EXPECT_TRUE(gradient(x).defined());
}

TEST(Checkpoint, AFunctionThatChangesItsMindIsAnError) {
  const Tensor x = leaf({2});
  int runs = 0;
  const auto fickle = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    return {runs++ == 0 ? exp(in[0]) : exp(exp(in[0]))};
  };
  EXPECT_THROW(backward(sum(checkpoint(fickle, {x})[0])), StateError);
}

// A policy chooses what is kept: gradients stay the same, and each kept op runs once.
TEST(SelectiveCheckpoint, ComputesAgainWhatThePolicyDoesNotKeep) {
  // What reaches the place where ops run, by name.
  class Counting final : public op::Builder {
   public:
    explicit Counting(op::Builder& below) : Builder(op::Place::kBottom), rest_{&below} {}
    void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
              op::Rest) override {
      ++runs[op.name];
      rest_.all().call(op, in, attrs, out);
    }
    void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                   op::Rest) override {
      rest_.all().call_into(op, in, attrs, out);
    }
    std::map<std::string, int> runs;

   private:
    op::Stack rest_;
  };
  const auto block = [](const std::vector<Tensor>& in) -> std::vector<Tensor> { return {tanh(exp(in[0]))}; };
  const Tensor x = leaf({0.5, -1.5});
  backward(sum(block({x})[0]));
  const Values expected = values(gradient(x));
  for (const char* kept : {"exp", "tanh", "nothing"}) {
    set_gradient(x, {});
    int asked = 0;
    Counting counting(*op::current_stack().at(op::Place::kBottom));
    {
      const op::Under counts(op::current_stack().with(counting));
      const Tensor y = checkpoint(block, {x}, [&](const op::OpDef& op) {
        ++asked;
        return op.name == std::string(kept);
      })[0];
      EXPECT_EQ(asked, 2) << kept;
      backward(sum(y));
    }
    EXPECT_EQ(asked, 4) << kept;
    EXPECT_EQ(values(gradient(x)), expected) << kept;
    for (const char* name : {"exp", "tanh"}) EXPECT_EQ(counting.runs[name], name == std::string(kept) ? 1 : 2) << kept;
  }
}

TEST(SelectiveCheckpoint, AKeptResultThatWasOverwrittenIsAnError) {
  const Tensor x = leaf({0.5});
  Tensor seen;
  const auto block = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    const Tensor y = exp(in[0]);
    if (!seen.defined()) seen = y;
    return {tanh(mul(y, 2))};
  };
  const auto keep_exp = [](const op::OpDef& op) { return op.name == std::string("exp"); };
  const Tensor z = checkpoint(block, {x}, keep_exp)[0];
  {
    const NoGrad quiet;
    add_(seen, 1);
  }
  EXPECT_THROW(backward(sum(z)), StateError);
}

struct WrongShape : Function {
  const char* name() const override { return "wrong_shape"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {mul(in[0], 2)}; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {ones({3}, DType::kF64)}; }
};

TEST(Function, AGradientOfAWrongShapeIsTheFunctionsMistake) {
  const Tensor x = leaf({1, 2});
  const Tensor y = sum(apply<WrongShape>({x})[0]);
  try {
    backward(y);
    FAIL() << "a wrong gradient was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what())
                  .find("[wrong_shape] backward returned a gradient of shape [3] for input 0 of "
                        "shape [2]"),
              std::string::npos)
        << error.what();
  }
}

struct SavedNothing : Function {
  const char* name() const override { return "saved_nothing"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {mul(in[0], 2)}; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override { return {mul(dout[0], saved()[0])}; }
};

TEST(Function, AskingForWhatWasNotSavedIsAnErrorThatNamesTheFunction) {
  const Tensor y = sum(apply<SavedNothing>({leaf({1, 2})})[0]);
  try {
    backward(y);
    ADD_FAILURE() << "nothing was saved";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("[saved_nothing] saved()[0]"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace chorale
