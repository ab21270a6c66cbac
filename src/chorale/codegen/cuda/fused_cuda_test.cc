// Compiled functions on a GPU: what is pointwise becomes loops of CUDA C (kernel/cuda/element_loop.h), with the bits of
// the ops one by one.
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/api/replay.h"
#include "chorale/api/table_test_util.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/runtime.h"
#include "chorale/kernel/kernel_maker.h"
#include "chorale/op/samples.h"
#include "chorale/op/update.h"

namespace chorale::codegen {
namespace {

using cuda::kGpu;
using cuda::rehearses;

class CudaFused : public cuda::GpuTest {};

Tensor made(const Shape& sizes, int seed, DType dtype, double low = -2, double high = 2) {
  return to(to(op::sample(sizes, seed, low, high), dtype), kGpu);
}

// Fused kernels of the graphs that are compiled with it, in all.
compiled::Backend counting(int& fused_nodes) {
  return [&fused_nodes](graph::Graph graph, const compiled::GraphInfo&) {
    auto program = fuse_and_compile(std::move(graph));
    for (const graph::Node& node : program->graph().nodes) fused_nodes += node.kind == graph::Node::Kind::kFused;
    return program;
  };
}

void expect_same_bits(const std::vector<Tensor>& found, const std::vector<Tensor>& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  if (rehearses()) return;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].dtype(), expected[i].dtype());
    op::expect_close(to(found[i], kCpu), to(expected[i], kCpu), 0, concat(what, ", result ", i));
  }
}

// Words of every kind: arithmetic, comparisons that choose, rounding, elementary functions (f64 has none in a fused
// kernel, and runs them as rows), numbers, casts.
std::vector<Tensor> words(const std::vector<Tensor>& in) {
  const Tensor &a = in[0], &b = in[1], &c = in[2];
  const Tensor t = add(mul(a, b), 0.25), u = where(gt(a, b), sub(t, c), div(t, add(abs(c), 1.0)));
  const Tensor v = maximum(minimum(u, 1.5), mul(floor(a), 0.5)), w = add(tanh(v), mul(sigmoid(u), exp(neg(abs(t)))));
  const Tensor x = add(gelu(w), sqrt(add(square(v), 0.5)));
  return {x, to(le(x, v), a.dtype()), isnan(div(c, sub(a, a))), to(to(w, DType::kF32), a.dtype()),
          clamp(u, -0.5, 0.75)};
}

TEST_F(CudaFused, HasTheBitsOfTheOpsOneByOne) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    struct Case {
      const char* what;
      std::vector<Tensor> in;
    };
    const std::vector<Case> cases = {
        {"one behind the other", {made({64, 96}, 1, dtype), made({64, 96}, 2, dtype), made({64, 96}, 3, dtype)}},
        {"odd sizes", {made({7, 13}, 1, dtype), made({7, 13}, 2, dtype), made({7, 13}, 3, dtype)}},
        {"rows, columns, one", {made({33, 40}, 1, dtype), made({40}, 2, dtype), made({33, 1}, 3, dtype)}},
        {"turned", {made({24, 32}, 1, dtype), transpose(made({32, 24}, 2, dtype), 0, 1), made({}, 3, dtype)}},
        {"three dimensions", {made({5, 6, 16}, 1, dtype), made({5, 1, 16}, 2, dtype), made({6, 1}, 3, dtype)}},
    };
    for (const Case& one : cases) {
      int fused_nodes = 0;
      const auto step = compile(words, {.whole_graph = true, .backend = counting(fused_nodes)});
      expect_same_bits(step(one.in), words(one.in), concat(one.what, " ", dtype));
      EXPECT_GE(fused_nodes, 1) << one.what << ' ' << dtype;
    }
    if (rehearses()) return;  // the texts differ by their types only, and compiling them takes long
  }
}

TEST_F(CudaFused, MixedDtypesAndOtherOperands) {
  const Tensor a = made({32, 64}, 1, DType::kBF16), b = made({32, 64}, 2, DType::kF32),
               flags = gt(made({32, 64}, 3, DType::kF32), 0.0),
               numbers = to(to(op::sample({64}, 4, 0, 9), DType::kI64), kGpu);
  const auto f = [](const std::vector<Tensor>& in) {
    const Tensor x = add(to(in[0], DType::kF32), in[1]), y = where(in[2], x, mul(x, in[3]));
    return std::vector{to(y, DType::kBF16), mul(y, to(in[2], DType::kF32))};
  };
  int fused_nodes = 0;
  const auto step = compile(f, {.whole_graph = true, .backend = counting(fused_nodes)});
  const std::vector<Tensor> in{a, b, flags, numbers};
  expect_same_bits(step(in), f(in), "mixed");
  EXPECT_GE(fused_nodes, 1);
}

// A step with gradients and updates: the same function eagerly, compiled whole, in segments, and compiled and replayed.
std::vector<std::vector<double>> train(bool compiled, bool whole, bool replayed) {
  Tensor w1 = made({12, 32}, 1, DType::kF32, -0.4, 0.4), b1 = made({32}, 2, DType::kF32, -0.1, 0.1),
         w2 = made({32, 4}, 3, DType::kF32, -0.4, 0.4);
  const std::vector<Tensor> parameters{w1, b1, w2};
  for (const Tensor& p : parameters) set_requires_grad(p);
  const auto body = [&](const std::vector<Tensor>& in) {
    for (const Tensor& p : parameters) set_gradient(p, {});
    const Tensor y = matmul(gelu(add(matmul(in[0], w1), b1)), w2), loss = mean(square(sub(tanh(y), in[1])));
    backward(loss);
    const NoGrad quiet;
    for (const Tensor& p : parameters) sub_(p, mul(gradient(p), 0.1));
    return std::vector{detach(loss)};
  };
  auto step = compile(body, {.whole_graph = whole, .backend = fused()});
  Replayed replay([&](const std::vector<Tensor>& in) { return step(in); });
  std::vector<std::vector<double>> found;
  for (int i = 0; i < 6; ++i) {
    const std::vector<Tensor> in{made({8, 12}, 20 + i, DType::kF32), made({8, 4}, 40 + i, DType::kF32)};
    found.push_back((replayed ? replay(in) : compiled ? step(in) : body(in))[0].to_vector<double>());
  }
  for (const Tensor& p : parameters) found.push_back(p.to_vector<double>());
  return found;
}

TEST_F(CudaFused, AStepTrainsAsItDoesEagerly) {
  const auto expected = train(false, false, false), whole = train(true, true, false), cut = train(true, false, false);
  if (rehearses()) return;
  EXPECT_EQ(whole, expected);
  EXPECT_EQ(cut, expected);
  EXPECT_NE(expected[0], expected[5]);
  EXPECT_EQ(train(true, true, true), expected) << "replayed";
}

// Two layers under autocast, trained by AdamW: casts are joined (graph/passes/join_casts.h).
std::vector<std::vector<float>> train_under_autocast(bool compiled, bool replayed) {
  UpdateLists lists;
  for (const Shape& sizes : {Shape{40, 24}, {40}, {7, 40}, {7}}) {
    const auto seed = static_cast<int>(lists.size());
    lists.parameters.push_back(made(sizes, seed, DType::kF32, -0.4, 0.4));
    set_requires_grad(lists.parameters.back());
    lists.steps.push_back(zeros({}, DType::kI64, kGpu));
    for (size_t s = 0; s < 2; ++s) lists.states[s].push_back(zeros(sizes, DType::kF32, kGpu));
  }
  lists.lr = full({}, 0.01, DType::kF64, kGpu);
  const std::vector<Tensor>& p = lists.parameters;
  const auto body = [&](const std::vector<Tensor>& in) {
    for (const Tensor& one : p) set_gradient(one, {});
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      loss = mean(square(to(linear(gelu(linear(in[0], p[0], p[1])), p[2], p[3]), DType::kF32)));
    }
    backward(loss);
    const NoGrad quiet;
    lists.gradients.clear();
    for (const Tensor& one : p) lists.gradients.push_back(gradient(one));
    adam_(lists, {.weight_decay = 0.1, .decoupled = true});
    return std::vector{detach(loss), lists.gradients[0], lists.gradients[1]};
  };
  auto step = compile(body, {.whole_graph = true, .backend = fused()});
  Replayed replay([&](const std::vector<Tensor>& in) { return step(in); });
  std::vector<std::vector<float>> found;
  for (int i = 0; i < 5; ++i) {
    const std::vector<Tensor> in{made({96, 24}, 20 + i, DType::kF32)};
    for (const Tensor& x : replayed ? replay(in) : compiled ? step(in) : body(in))
      found.push_back(x.to_vector<float>());
  }
  for (const auto* const list : {&lists.parameters, &lists.states[0], &lists.states[1]}) {
    for (const Tensor& x : *list) found.push_back(x.to_vector<float>());
  }
  return found;
}

TEST_F(CudaFused, AStepUnderAutocastTrainsAsItDoesEagerly) {
  const auto expected = train_under_autocast(false, false), compiled = train_under_autocast(true, false);
  if (rehearses()) return;
  EXPECT_EQ(compiled, expected);
  EXPECT_EQ(train_under_autocast(true, true), expected) << "replayed";
}

// What makes kernels ahead (kernel/kernel_maker.h) launches none, and those that it has made are those of a launch.
TEST_F(CudaFused, KernelsAreMadeAheadWithoutLaunchingThem) {
  const Tensor x = made({37, 5}, 1, DType::kF32), y = made({37, 5}, 2, DType::kF32), before = clone(x);
  const auto all = [&] {
    mul_(x, 1.5);
    copy_(x, add(cos(x), matmul(y, transpose(x, 0, 1))[0][0]));
    fill_(x, 0);
  };
  kernel::find_kernel_maker(DeviceType::kCuda)->make_ahead(kGpu, all);
  expect_same_bits({x}, {before}, "ahead");
  all();
  expect_same_bits({x}, {zeros({37, 5}, DType::kF32, kGpu)}, "afterwards");
}

// Fills of a few bytes become kernels of a recording (device/cuda/recorded_fills.h).
TEST_F(CudaFused, ARecordingFillsAFewBytesEachTime) {
  if (rehearses()) return;
  const Tensor few = full({3}, 5.0, DType::kF32, kGpu), more = full({5000}, 5.0, DType::kBF16, kGpu);
  Replayed replay([&](const std::vector<Tensor>& in) {
    const Tensor before = add(few, in[0]), others = add(more, to(in[0], DType::kBF16)[0]);
    fill_(few, 0);
    fill_(more, 0);
    add_(few, in[0]);
    add_(more, to(in[0], DType::kBF16)[0]);
    return std::vector{before, others};
  });
  for (int i = 0; i < 4; ++i) {
    const std::vector<Tensor> in{full({3}, 1.0 + i, DType::kF32, kGpu)}, out = replay(in);
    const float last = i == 0 ? 5 : static_cast<float>(i), now = static_cast<float>(1 + i);
    EXPECT_EQ(out[0].to_vector<float>(), std::vector<float>(3, last + now)) << i;
    EXPECT_EQ(to(out[1], DType::kF32).to_vector<float>(), std::vector<float>(5000, last + now)) << i;
    EXPECT_EQ(few.to_vector<float>(), std::vector<float>(3, now)) << i;
  }
  EXPECT_GE(replay.replays(), 2);
}

// A compiled step that is recorded goes on in the memory that it had: it needs none of its own beside it.
TEST_F(CudaFused, ARecordingTakesOverTheMemoryOfAStep) {
  if (rehearses()) return;
  const Allocator& allocator = runtime_of(kGpu).allocator(kGpu);
  int64_t arena = 0;
  const compiled::Backend backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
    auto program = fuse_and_compile(std::move(graph));
    arena += program->plan().arena_bytes;
    return program;
  };
  const auto step = compile(
      [](const std::vector<Tensor>& in) {
        return std::vector{sum(matmul(tanh(matmul(in[0], in[0])), tanh(matmul(in[0], transpose(in[0], 0, 1)))))};
      },
      {.whole_graph = true, .backend = backend});
  Replayed replay([&](const std::vector<Tensor>& in) { return step(in); });
  const std::vector<Tensor> in{made({1024, 1024}, 1, DType::kF32, -0.1, 0.1)};
  const auto first = replay(in)[0].to_vector<float>();
  ASSERT_GE(arena, 8 << 20);
  runtime_of(kGpu).allocator(kGpu).reset_peak();
  const size_t before = allocator.stats().current_bytes;
  const auto second = replay(in)[0].to_vector<float>();
  EXPECT_EQ(replay.recordings(), 1);
  EXPECT_LT(allocator.stats().peak_bytes, before + static_cast<size_t>(arena) / 2);
  EXPECT_EQ(second, first);
  // What runs beside the recording has memory of its own.
  EXPECT_EQ(step(in)[0].to_vector<float>(), first);
  EXPECT_EQ(replay(in)[0].to_vector<float>(), first);
}

}  // namespace
}  // namespace chorale::codegen
