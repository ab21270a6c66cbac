// Linear layers of 8 bits on a GPU: bytes and scales are those of the CPU, and products are as close as sums of f32
// are.
#include <gtest/gtest.h>

#include "chorale/api/compile.h"
#include "chorale/api/replay.h"
#include "chorale/api/table_test_util.h"
#include "chorale/codegen/fused.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/kernel/fp8.h"
#include "chorale/nn/nn.h"
#include "chorale/op/fp8.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"

namespace chorale::parallel {
namespace {

using cuda::kGpu;
using cuda::rehearses;

class CudaFp8 : public cuda::GpuTest {};

struct Sizes {
  int64_t rows, in, out;
};
// Of squares of 128, as models have them; multiples of 16, which cuBLASLt takes; and others.
constexpr Sizes kSizes[] = {{512, 256, 384}, {48, 80, 32}, {37, 50, 21}, {1, 256, 128}};

void expect_as_on_cpu(const op::OpDef& row, const std::vector<Tensor>& in, bool in_first, double tolerance,
                      const std::string& what) {
  const kernel::Fp8LinearAttrs attrs{in_first};
  const std::vector<Tensor> found = op::run(row, op::on_device(in, kGpu), attrs);
  if (rehearses()) return;
  const std::vector<Tensor> expected = op::run(row, in, attrs);
  for (size_t i = 0; i < found.size(); ++i)
    op::expect_close(to(found[i], kCpu), expected[i], expected[i].dtype() == DType::kU8 ? 0 : tolerance,
                     concat(what, " result ", i));
}

TEST_F(CudaFp8, MultipliesAsTheCpuDoes) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    const double tolerance = dtype == DType::kBF16  ? 2e-2
                             : dtype == DType::kF16 ? 3e-3
                             : dtype == DType::kF32 ? 6e-4
                                                    : 1e-5;
    for (const Sizes& s : kSizes) {
      for (const bool in_first : {true, false}) {
        const auto numbers = [&](const Shape& sizes, int seed, double factor) {
          return to(mul(op::sample(sizes, seed), factor), dtype);
        };
        const std::string what = concat(dtype, " ", s.rows, " x ", s.in, " by ", s.out, in_first ? " in first" : "");
        const Tensor x = numbers({s.rows, s.in}, 1, 1), bias = numbers({s.out}, 3, 1),
                     weight = numbers(in_first ? Shape{s.in, s.out} : Shape{s.out, s.in}, 2, 0.01);
        expect_as_on_cpu(op::kFp8Linear, {x, weight, bias}, in_first, tolerance, what);
        expect_as_on_cpu(op::kFp8Linear, {x, weight, Tensor()}, in_first, tolerance, concat(what, " without bias"));
        const auto made = op::run(op::kFp8Linear, {x, weight, bias}, kernel::Fp8LinearAttrs{in_first});
        expect_as_on_cpu(op::kFp8LinearBackward, {numbers({s.rows, s.out}, 4, 1e-3), made[1], made[2], made[3]},
                         in_first, tolerance, concat(what, " backward"));
      }
    }
    if (rehearses()) return;  // the texts differ by their types only
  }
}

// Zeros, and numbers whose largest is next to where the scale changes, tiny, or not finite.
TEST_F(CudaFp8, FindsTheScalesOfTheCpu) {
  if (rehearses()) return;
  for (const double largest :
       {0.0, 448.0, 448.5, 1e-30, 3e38, 1e-42, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    std::vector<float> values(32 * 16, 0.0f);
    values[77] = static_cast<float>(-largest);
    values[78] = static_cast<float>(largest / 3);
    const std::vector<Tensor> in = {Tensor::from(values, {32, 16}), ones({16, 16}), Tensor()};
    const auto found = op::run(op::kFp8Linear, op::on_device(in, kGpu), kernel::Fp8LinearAttrs{}),
               expected = op::run(op::kFp8Linear, in, kernel::Fp8LinearAttrs{});
    op::expect_close(to(found[3], kCpu), expected[3], 0, concat("scales for ", largest));
    op::expect_close(to(found[0], kCpu), expected[0], 1e-6, concat("product for ", largest));
    if (std::isfinite(largest)) op::expect_close(to(found[1], kCpu), expected[1], 0, concat("bytes for ", largest));
  }
}

struct Net : nn::Module {
  nn::Linear first{64, 256}, second{256, 64}, head{64, 16};
  CHORALE_MODULE(Net, first, second, head)
  Tensor forward(const Tensor& x) { return head(second(gelu(first(x)))); }
};

enum class Way { kEager, kReplayed, kCompiled };
std::vector<double> losses(Device device, Way way) {
  manual_seed(3);
  Net net;
  nn::use_fp8(net, {"head"});
  net.to(device);
  optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-3});
  const Tensor x = to(to(op::sample({128, 64}, 1), DType::kF32), device),
               target = to(op::sample_ints({128}, 0, 16, 2), device);
  const Replayed::Function step = [&](const std::vector<Tensor>& in) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      loss = cross_entropy(net(in[0]), in[1]);
    }
    backward(loss);
    optimizer.step();
    return std::vector{detach(loss)};
  };
  auto compiled = compile(step, {.whole_graph = true, .backend = codegen::fused()});
  Replayed replay(
      way == Way::kCompiled ? Replayed::Function([&](const std::vector<Tensor>& in) { return compiled(in); }) : step);
  std::vector<double> found;
  for (int i = 0; i < (rehearses() ? 1 : 20); ++i) {
    const Tensor loss = (way == Way::kEager ? step({x, target}) : replay({x, target}))[0];
    if (!rehearses()) found.push_back(loss.item<float>());
  }
  return found;
}

TEST_F(CudaFp8, TrainsAsTheCpuDoesAlsoReplayed) {
  const auto here = losses(kGpu, Way::kEager);
  if (rehearses()) return;
  const auto expected = losses(kCpu, Way::kEager);
  for (size_t i = 0; i < here.size(); ++i) EXPECT_NEAR(here[i], expected[i], 2e-2 * expected[0]) << i;
  EXPECT_LT(here.back(), 0.8 * here.front());
  EXPECT_EQ(losses(kGpu, Way::kReplayed), here);
  const auto compiled = losses(kGpu, Way::kCompiled);
  for (size_t i = 0; i < here.size(); ++i) EXPECT_NEAR(compiled[i], here[i], 1e-2 * here[0]) << i;
}

}  // namespace
}  // namespace chorale::parallel
