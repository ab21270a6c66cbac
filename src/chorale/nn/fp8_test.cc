#include "chorale/nn/fp8.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/kernel/fp8.h"
#include "chorale/nn/nn.h"
#include "chorale/op/fp8.h"
#include "chorale/op/samples.h"

namespace chorale::nn {
namespace {

// Eighths up to 7/8: 8 bits have them all, so nothing is rounded.
Tensor eighths(const Shape& sizes, int seed) {
  return mul(to(op::sample_ints(sizes, -7, 8, seed), DType::kF32), 0.125);
}

// The result, and the gradients of x, weight and bias.
template <class Layer>
std::vector<Tensor> run(const Layer& layer, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Tensor& slope) {
  std::vector<Tensor> in;
  for (const Tensor& one : {x, weight, bias}) {
    in.push_back(clone(one));
    set_requires_grad(in.back());
  }
  const Tensor y = layer(in[0], in[1], in[2]);
  backward(sum(mul(y, slope)));
  return {detach(y), gradient(in[0]), gradient(in[1]), gradient(in[2])};
}

TEST(Fp8Linear, RoundsNothingThatEightBitsHave) {
  for (const bool in_first : {false, true}) {
    const Tensor x = eighths({2, 5, 6}, 1), weight = eighths(in_first ? Shape{6, 3} : Shape{3, 6}, 2),
                 bias = eighths({3}, 3), slope = eighths({2, 5, 3}, 4);
    const auto rounded =
        run([&](auto& a, auto& w, auto& b) { return fp8_linear(a, w, b, in_first); }, x, weight, bias, slope);
    const auto plain = run([&](auto& a, auto& w, auto& b) { return linear(a, in_first ? transpose(w, 0, 1) : w, b); },
                           x, weight, bias, slope);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(rounded[i].sizes(), plain[i].sizes());
      EXPECT_EQ(rounded[i].to_vector<float>(), plain[i].to_vector<float>()) << i;
    }
  }
}

// What is nearest in 8 bits, with the scale of the whole tensor, in plain numbers.
std::vector<double> in_8_bits(const Tensor& x, kernel::Fp8 format) {
  std::vector<double> values = x.to_vector<double>();
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  const double most = format == kernel::Fp8::kE4m3 ? 448 : 57344, up = std::exp2(std::floor(std::log2(most / largest)));
  for (double& value : values)
    value = kernel::from_fp8(kernel::to_fp8(static_cast<float>(value * up), format), format) / up;
  return values;
}

TEST(Fp8Linear, MultipliesValuesInE4m3AndGradientsInE5m2) {
  constexpr int64_t rows = 5, in = 7, out = 3;
  const auto numbers = [](const Shape& sizes, int seed) { return to(op::sample(sizes, seed), DType::kF32); };
  const Tensor x = numbers({rows, in}, 1), weight = mul(numbers({out, in}, 2), 1e-3), bias = numbers({out}, 3),
               slope = mul(numbers({rows, out}, 4), 1e5);
  const auto found = run([](auto& a, auto& w, auto& b) { return fp8_linear(a, w, b); }, x, weight, bias, slope);
  const auto a = in_8_bits(x, kernel::Fp8::kE4m3), w = in_8_bits(weight, kernel::Fp8::kE4m3),
             d = in_8_bits(slope, kernel::Fp8::kE5m2), b = bias.to_vector<double>();
  const auto expect = [](const Tensor& tensor, int64_t at, double value) {
    EXPECT_NEAR(tensor.to_vector<double>()[static_cast<size_t>(at)], value, 1e-5 * std::fabs(value) + 1e-7) << at;
  };
  const auto sum_of = [](int64_t count, const auto& term) {
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += term(i);
    return total;
  };
  const auto at = [](const std::vector<double>& values, int64_t i) { return values[static_cast<size_t>(i)]; };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o)
      expect(found[0], r * out + o,
             sum_of(in, [&](int64_t i) { return at(a, r * in + i) * at(w, o * in + i); }) + at(b, o));
    for (int64_t i = 0; i < in; ++i)
      expect(found[1], r * in + i, sum_of(out, [&](int64_t o) { return at(d, r * out + o) * at(w, o * in + i); }));
  }
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t i = 0; i < in; ++i)
      expect(found[2], o * in + i, sum_of(rows, [&](int64_t r) { return at(d, r * out + o) * at(a, r * in + i); }));
  }
}

TEST(Fp8Linear, PassesOnWhatIsNotFinite) {
  Tensor x = eighths({3, 4}, 1);
  const Tensor weight = eighths({2, 4}, 2);
  for (const double bad : {INFINITY, NAN}) {
    fill_(select(select(x, 0, 1), 0, 2), bad);
    for (const float y : fp8_linear(x, weight).to_vector<float>()) EXPECT_TRUE(std::isnan(y));
  }
}

TEST(Fp8Linear, TakesEmptyInputs) {
  EXPECT_EQ(fp8_linear(zeros({0, 4}), zeros({2, 4})).sizes(), (Shape{0, 2}));
  EXPECT_EQ(fp8_linear(zeros({3, 0}), zeros({2, 0}), ones({2})).to_vector<float>(), std::vector<float>(6, 1));
}

TEST(Fp8Linear, RefusesWhatDoesNotFit) {
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message([] { fp8_linear(zeros({3, 4}), zeros({2, 5})); }).find("[fp8_linear] x"), std::string::npos);
  EXPECT_NE(message([] { fp8_linear(zeros({3, 4}), zeros({2, 4}), zeros({3})); }).find("bias"), std::string::npos);
}

struct Net : Module {
  Embedding table{16, 8};
  Linear first{8, 32}, second{32, 8}, head{8, 16, {.bias = false}};
  CHORALE_MODULE(Net, table, first, second, head)
  Net() { head.weight = table.weight; }
  Tensor forward(const Tensor& ids) { return head(second(gelu(first(table(ids))))); }
};

TEST(UseFp8, LeavesTiedAndNamedLayersAsTheyAre) {
  Net net;
  EXPECT_EQ(use_fp8(net), (std::vector<std::string>{"first", "second"}));
  EXPECT_TRUE(net.first.fp8() && net.second.fp8());
  EXPECT_FALSE(net.head.fp8());
  Net other;
  EXPECT_EQ(use_fp8(other, {"second"}), std::vector<std::string>{"first"});
  EXPECT_TRUE(clone(other).first.fp8());
  EXPECT_THROW(use_fp8(other, {"third"}), InvalidArgument);
  Embedding table(2, 2);
  EXPECT_THROW(use_fp8(table), InvalidArgument);
}

// Learns which token follows: the loss goes down as it does without, and a compiled step has the bits of the eager one.
std::vector<double> losses(bool fp8, bool compiled) {
  manual_seed(3);
  Net net;
  if (fp8) use_fp8(net);
  const std::vector<Tensor> parameters = net.parameters();
  const Tensor ids = op::sample_ints({64}, 0, 16, 1), next = remainder(add(mul(ids, 5), 3), 16);
  const auto step = [&](const std::vector<Tensor>& in) {
    net.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      loss = cross_entropy(net(in[0]), in[1]);
    }
    backward(loss);
    const NoGrad quiet;
    for (const Tensor& p : parameters) sub_(p, mul(gradient(p), 0.5));
    return std::vector{detach(loss)};
  };
  auto graph = compile(step, {.whole_graph = true});
  std::vector<double> found;
  const std::vector<Tensor> in = {ids, next};
  for (int i = 0; i < 60; ++i) {
    const Tensor loss = (compiled ? graph(in) : step(in))[0];
    found.push_back(loss.item<float>());
  }
  return found;
}

TEST(UseFp8, TrainsAsWithout) {
  const auto plain = losses(false, false), rounded = losses(true, false);
  EXPECT_LT(rounded.back(), 0.3 * rounded.front());
  EXPECT_NE(rounded.back(), plain.back());
  EXPECT_NEAR(rounded.back(), plain.back(), 0.1 * plain.front());
  EXPECT_EQ(losses(true, true), rounded);
}

}  // namespace
}  // namespace chorale::nn
