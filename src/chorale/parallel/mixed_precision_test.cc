#include "chorale/parallel/mixed_precision.h"

#include "chorale/base/error.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

constexpr MixedPrecision kHalf{.parameters = DType::kF16, .reduce = DType::kF16, .buffers = DType::kF16};

struct Half : nn::Module {
  Linear m{1, 5};
  nn::Buffer buffer;
  nn::Parameter p;
  CHORALE_MODULE(Half, m, buffer, p)
  Half() : buffer(pattern({1, 2}, 1)), p(pattern({10, 5}, 2), false) {}
  Tensor forward(const Tensor& x) {
    for (const Tensor& t : {static_cast<Tensor>(m.weight), static_cast<Tensor>(m.bias), static_cast<Tensor>(p),
                            static_cast<Tensor>(buffer), x}) {
      EXPECT_EQ(t.dtype(), DType::kF16);
    }
    return add(m(x), p);
  }
};

// Ten inputs, all multiples of 1/16: their sums are exact in f16.
Tensor sixteenths(int seed) {
  std::vector<float> values(10);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((static_cast<int>(i) * 7 + seed * 5 + 3) % 33) / 16;
  return Tensor::from(values, {10, 1});
}

// spec: test_ddp_native_mixed_precision_{,no_}grad_as_bucket_view_{no_set_grad_none,set_grad_to_none}
TEST(MixedPrecision, ForwardIsInF16AndParametersAndGradientsAreInF32) {
  for (bool views : {false, true}) {
    for (bool to_none : {false, true}) {
      run_ranks(2, [=](comm::Group& group) {
        DistributedDataParallel ddp(seeded(Half(), group.rank()), group,
                                    {.gradient_as_bucket_view = views, .mixed_precision = kHalf});
        EXPECT_EQ(ddp.module().buffer.dtype(), DType::kF16);
        for (int step = 0; step < 6; ++step) {
          const Tensor y = ddp(sixteenths(step + 10 * group.rank()));
          EXPECT_EQ(y.dtype(), DType::kF16);
          backward(sum(y));
          for (const auto& [name, parameter] : ddp.module().named_parameters()) {
            EXPECT_EQ(parameter.dtype(), DType::kF32) << name;
            if (!requires_grad(parameter)) {
              EXPECT_FALSE(gradient(parameter).defined());
              continue;
            }
            EXPECT_EQ(gradient(parameter).dtype(), DType::kF32);
            expect_same_on_all_ranks(group, gradient(parameter), name);
          }
          ASSERT_EQ(ddp.mixed_parameters().size(), 3u);
          for (const MixedParameters::Entry& entry : ddp.mixed_parameters()) {
            EXPECT_EQ(entry.shadow.dtype(), DType::kF16);
            EXPECT_EQ(entry.master.dtype(), DType::kF32);
          }
          // The average over ranks of the sums of inputs, and of the numbers of rows: f16 holds both exactly.
          const double average = (sum(sixteenths(step)).item<double>() + sum(sixteenths(step + 10)).item<double>()) / 2;
          EXPECT_GT(std::abs(average), 0.1);
          expect_close(gradient(ddp.module().m.weight), full({5, 1}, average), "weight", 0, 0);
          expect_close(gradient(ddp.module().m.bias), full({5}, 10), "bias", 0, 0);
          ddp.zero_grad(to_none);
        }
      });
    }
  }
}

struct WithBuffer : nn::Module {
  TwoLin lins;
  nn::Buffer buffer;
  CHORALE_MODULE(WithBuffer, lins, buffer)
  WithBuffer() : buffer(ones({5})) {}
  Tensor forward(const Tensor& x) { return std::get<1>(lins(x)); }
};

// spec: test_ddp_native_mixed_precision_ignored_params
TEST(MixedPrecision, IgnoredTensorsHaveNoShadow) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(WithBuffer(), group, {.ignore = {"lins.a.weight", "buffer"}, .mixed_precision = kHalf});
    ASSERT_EQ(ddp.mixed_parameters().size(), 1u);
    EXPECT_EQ(ddp.mixed_parameters()[0].name, "lins.b.weight");
    EXPECT_TRUE(ddp.mixed_parameters()[0].master.is(ddp.module().lins.b.weight));
    EXPECT_EQ(ddp.mixed_parameters()[0].shadow.dtype(), DType::kF16);
    EXPECT_EQ(ddp.module().buffer.dtype(), DType::kF32);
    EXPECT_EQ(ddp.module().lins.a.weight.dtype(), DType::kF32);
  });
}

TEST(MixedPrecision, AnExceptionInForwardPutsTheMastersBack) {
  struct Stop {};
  run_ranks(1, [](comm::Group& group) {
    Linear lin(2, 2);
    lin.before_forward([](nn::Module&, std::vector<Tensor>&) { throw Stop(); });
    DistributedDataParallel ddp(lin, group, {.mixed_precision = kHalf});
    EXPECT_THROW(ddp(ones({1, 2})), Stop);
    EXPECT_TRUE(ddp.module().weight.is(lin.weight));
  });
}

// A gradient that is not finite on one rank keeps all ranks from the step, and their scales stay equal.
TEST(MixedPrecision, AnInfiniteGradientOfOneRankSkipsTheStepOnAll) {
  for (bool views : {false, true}) {
    run_ranks(2, [views](comm::Group& group) {
      DistributedDataParallel ddp(seeded(Linear(2, 2), 1), group, {.gradient_as_bucket_view = views});
      optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1});
      optim::GradScaler scaler;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        Tensor x = pattern({1, 2}, step);
        if (step == 1 && group.rank() == 1) x = full({1, 2}, std::numeric_limits<double>::infinity());
        backward(scaler.scale(sum(ddp(x))));
        EXPECT_EQ(scaler.step(optimizer), step != 1);
        scaler.update();
        for (const Tensor& p : ddp.parameters()) expect_same_on_all_ranks(group, p);
      }
      EXPECT_EQ(scaler.scale(), 32768);
    });
  }
}

struct AddsBuffer : nn::Module {
  Linear l1{1, 1};
  nn::Buffer buffer;
  CHORALE_MODULE(AddsBuffer, l1, buffer)
  AddsBuffer() : buffer(ones({1})) {}
  Tensor forward(const Tensor& x) { return add(l1(x), buffer); }
};

// spec: test_stateless_api_with_ddp
TEST(Substitution, AWrapperComputesWithOtherTensors) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(AddsBuffer(), 1), group);
    AddsBuffer& net = ddp.module();
    const Tensor own_weight = net.l1.weight, own_buffer = net.buffer;
    const Tensor before = clone(detach(own_weight));
    const Tensor weight = set_requires_grad(ones({1, 1})), bias = set_requires_grad(zeros({1})), buffer = zeros({1});
    const Tensor x = pattern({1, 1}, 3);
    {
      const Substitution scope(net, {{"l1.weight", weight}, {"l1.bias", bias}, {"buffer", buffer}});
      const Tensor y = ddp(x);
      expect_close(y, x);
      backward(y);
    }
    EXPECT_TRUE(net.l1.weight.is(own_weight));
    EXPECT_TRUE(net.buffer.is(own_buffer));
    EXPECT_TRUE(equal_bits(own_weight, before));
    EXPECT_TRUE(equal_bits(own_buffer, ones({1})));
    EXPECT_TRUE(gradient(weight).defined() && gradient(bias).defined());
    for (const Tensor& t : {own_weight, static_cast<Tensor>(net.l1.bias), own_buffer, buffer}) {
      EXPECT_FALSE(gradient(t).defined());
    }
    EXPECT_THROW(Substitution(net, {{"l2.weight", weight}}), InvalidArgument);
    EXPECT_THROW(Substitution(net, {{"l1.weight", bias}}), InvalidArgument);
  });
}

}  // namespace
}  // namespace chorale::parallel
