// Graphs of tensors on a device, on simulated ones: they run there, on the current stream, and the current device is
// something that a graph depends on. Rows of compiled-training.md that need two devices are proved here, on sim:0 and
// sim:1.
#include <gtest/gtest.h>

#include <optional>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/device/program.h"
#include "chorale/device/runtime.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/op/device_scope.h"
#include "chorale/op/samples.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

Device sim_device(int index) { return {DeviceType::kSim, static_cast<int16_t>(index)}; }
// The current device: that of tensors which nothing else decides about.
Device current_device() { return op::creation_device(kCpu); }

class DeviceGraphs : public testing::Test {
 protected:
  void SetUp() override { eager::add_sim_device({.devices = 2, .most_delay = std::chrono::microseconds(20)}); }
};

Tensor made(const Shape& sizes, int seed, Device device) {
  return to(to(op::sample(sizes, seed, -1, 1), DType::kF32), device);
}
std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

// Losses and parameters of a few steps with gradients and updates in place.
std::vector<std::vector<float>> train(Device device, bool compiled, bool whole, bool drops) {
  manual_seed(5);
  const Tensor w1 = made({6, 8}, 1, device), b1 = made({8}, 2, device), w2 = made({8, 3}, 3, device);
  const std::vector<Tensor> parameters{w1, b1, w2};
  for (const Tensor& p : parameters) set_requires_grad(p);
  const auto body = [&](const std::vector<Tensor>& in) {
    for (const Tensor& p : parameters) set_gradient(p, {});
    Tensor h = tanh(add(matmul(in[0], w1), b1));
    if (drops) h = dropout(h, 0.3);
    const Tensor loss = mean(square(sub(matmul(h, w2), in[1])));
    backward(loss);
    const NoGrad quiet;
    for (const Tensor& p : parameters) sub_(p, mul(gradient(p), 0.1));
    return std::vector{detach(loss)};
  };
  auto step = compile(body, {.whole_graph = whole, .backend = fused()});
  std::vector<std::vector<float>> found;
  const Stream streams[] = {make_stream(device), make_stream(device)};
  for (int i = 0; i < 6; ++i) {
    const Stream stream = device == kCpu ? current_stream(kCpu) : streams[i / 2 % 2];
    const StreamScope scope(stream);
    const std::vector<Tensor> in{made({4, 6}, 20 + i, device), made({4, 3}, 40 + i, device)};
    found.push_back(values((compiled ? step(in) : body(in))[0]));
    synchronize(stream);
  }
  if (compiled) {
    EXPECT_EQ(step.frame().report().uncompiled, 0);
    EXPECT_GE(step.frame().report().compiles, 1);
  }
  for (const Tensor& p : parameters) found.push_back(values(p));
  return found;
}

TEST_F(DeviceGraphs, AStepTrainsAsItDoesOnTheCpu) {
  for (const bool drops : {false, true}) {
    const auto expected = train(kCpu, false, false, drops);
    EXPECT_NE(expected[0], expected[5]);
    for (const bool whole : {false, true})
      EXPECT_EQ(train(sim_device(0), true, whole, drops), expected) << whole << drops;
  }
}

// Two threads run one graph on streams of their own: neither waits for the other, nor writes where the other reads.
TEST_F(DeviceGraphs, MemoryBetweenTheNodesBelongsToAStream) {
  const Device device = sim_device(0);
  auto f = compile([](const Tensor& x) { return matmul(tanh(matmul(x, x)), x); }, {.whole_graph = true});
  const Tensor a = made({40, 40}, 1, device), b = made({40, 40}, 2, device);
  const auto expected_a = values(matmul(tanh(matmul(a, a)), a)), expected_b = values(matmul(tanh(matmul(b, b)), b));
  const Stream first = make_stream(device), second = make_stream(device);
  for (int i = 0; i < 20; ++i) {
    Tensor of_a, of_b;
    {
      const StreamScope scope(first);
      of_a = f(a);
    }
    {
      const StreamScope scope(second);
      of_b = f(b);
    }
    synchronize(device);
    ASSERT_EQ(values(of_a), expected_a);
    ASSERT_EQ(values(of_b), expected_b);
  }
}

// A step that is recorded goes on in the memory that it had, and what runs beside the program takes memory anew.
TEST_F(DeviceGraphs, ARecordingTakesOverTheMemoryOfAStep) {
  const Device device = sim_device(0);
  Allocator& allocator = runtime_of(device).allocator(device);
  int64_t arena = 0;
  const compiled::Backend backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
    auto program = std::make_shared<const graph::Program>(std::move(graph));
    arena += program->plan().arena_bytes;
    return program;
  };
  const auto f = [](const Tensor& x) {
    const Tensor a = matmul(x, x);
    return matmul(tanh(a), sigmoid(matmul(x, a)));
  };
  auto step = compile(f, {.whole_graph = true, .backend = backend});
  const Tensor x = made({96, 96}, 1, device), later = made({96, 96}, 2, device);
  const auto expected = values(f(x)), expected_later = values(f(later));
  synchronize(device);
  const Stream stream = make_stream(device), another = make_stream(device);
  std::optional<Program> program;
  Tensor result;
  {
    const StreamScope scope(stream);
    EXPECT_EQ(values(step(x)), expected);
    ASSERT_GE(arena, 2 * 96 * 96 * 4);
    allocator.reset_peak();
    const size_t before = allocator.stats().current_bytes;
    Recording recording(stream);
    result = step(x);
    program.emplace(recording.finish());
    EXPECT_LT(allocator.stats().peak_bytes, before + 96 * 96 * 4 + static_cast<size_t>(arena) / 2);
  }
  for (const bool is_later : {false, true}) {
    if (is_later) copy_(x, later);
    synchronize(device);
    program->run(another);
    const StreamScope scope(stream);
    EXPECT_EQ(values(step(x)), is_later ? expected_later : expected) << "beside the program";
    synchronize(device);
    EXPECT_EQ(values(result), is_later ? expected_later : expected);
  }
}

// A block of a transformer under autocast: rows that are joined (graph/passes/join_rows.h) have the bits of the ops.
TEST_F(DeviceGraphs, JoinedRowsHaveTheBitsOfTheOpsOneByOne) {
  const Device device = sim_device(0);
  constexpr int64_t B = 2, T = 6, H = 2, D = 8, W = H * D;
  std::vector<Tensor> parameters;
  const auto parameter = [&](const Shape& sizes) {
    parameters.push_back(made(sizes, static_cast<int>(10 + parameters.size()), device));
    set_requires_grad(parameters.back());
    return parameters.back();
  };
  const Tensor w1 = parameter({3 * W, W}), w2 = parameter({W, W}), w3 = parameter({W, W}), w4 = parameter({5, W}),
               w5 = parameter({W, W}), w6 = parameter({W, W}), b3 = parameter({W}), b5 = parameter({W});
  const std::vector<Tensor> scales = {parameter({W}), parameter({W}), parameter({W}), parameter({W})},
                            shifts = {parameter({W}), parameter({W}), parameter({W}), parameter({W})};
  const auto body = [&](const Tensor& in) {
    for (const Tensor& p : parameters) set_gradient(p, {});
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      const auto norm = [&](const Tensor& x, size_t i) { return layer_norm(x, {W}, scales[i], shifts[i]); };
      const Tensor parts = permute(view(linear(norm(in, 0), w1), {B, T, 3, H, D}), {2, 0, 3, 1, 4});
      const Tensor mixed = scaled_dot_product_attention(select(parts, 0, 0), select(parts, 0, 1), select(parts, 0, 2));
      const Tensor x = in + linear(reshape(transpose(mixed, 1, 2), {B, T, W}), w2);
      const Tensor y = x + linear(gelu(linear(norm(x, 1), w3, b3), Gelu::kTanh), w5, b5);
      const Tensor z = y + linear(norm(y, 3), w6);
      loss = mean(square(to(linear(norm(z, 2), w4), DType::kF32)));
    }
    backward(loss);
    std::vector<Tensor> results = {detach(loss)};
    for (const Tensor& p : parameters) results.push_back(gradient(p));
    return results;
  };
  std::string text;
  auto step = compile([&](const std::vector<Tensor>& in) { return body(in[0]); },
                      {.whole_graph = true, .backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
                         auto program = fuse_and_compile(std::move(graph));
                         text = graph::print(program->graph());
                         return program;
                       }});
  const Tensor in = made({B, T, W}, 1, device);
  const std::vector<Tensor> expected = body(in), found = step(std::vector<Tensor>{in});
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(values(found[i]), values(expected[i])) << i;
  for (const char* const row : {"add_layer_norm(", "add_layer_norm_backward(", "add_layer_norm_backward_summed(",
                                "gelu_tanh_backward_summed(", "attention_backward_joined("})
    EXPECT_NE(text.find(row), std::string::npos) << row << " is not in\n" << text;
}

// The last layer of a model: one row makes the loss and writes its gradient over the logits.
TEST_F(DeviceGraphs, ALossIsOneRowWithItsGradient) {
  const Device device = sim_device(0);
  const Tensor weight = made({40, 16}, 3, device), target = to(Tensor::from<int64_t>({3, 39, -100, 0, 7}, {5}), device);
  set_requires_grad(weight);
  for (const double factor : {1.0, 0.5}) {
    const auto body = [&](const std::vector<Tensor>& in) {
      set_gradient(weight, {});
      Tensor loss;
      {
        const Autocast scope(DType::kBF16);
        loss = cross_entropy(linear(in[0], weight), target);
      }
      backward(loss, factor == 1 ? Tensor() : full({}, factor, DType::kF32, device));
      return std::vector{detach(loss), gradient(weight)};
    };
    std::string text;
    auto step = compile(body, {.whole_graph = true, .backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
                                 auto program = fuse_and_compile(std::move(graph));
                                 text = graph::print(program->graph());
                                 return program;
                               }});
    const std::vector<Tensor> in = {made({5, 16}, 1, device)}, expected = body(in), found = step(in);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(values(found[i]), values(expected[i])) << factor << " " << i;
    const bool is_one = text.find("cross_entropy_with_slopes(") != std::string::npos;
    EXPECT_EQ(is_one, factor == 1) << text;
    EXPECT_EQ(text.find("cross_entropy_backward(") == std::string::npos, is_one) << text;
  }
}

// Two residual blocks of convolutions under autocast, the first one with a convolution beside it. Their images have
// channels last.
TEST_F(DeviceGraphs, JoinedBatchNormsHaveTheBitsOfTheOpsOneByOne) {
  const Device device = sim_device(0);
  std::vector<Tensor> parameters;
  const auto parameter = [&](const Shape& sizes) {
    parameters.push_back(made(sizes, static_cast<int>(10 + parameters.size()), device));
    set_requires_grad(parameters.back());
    return parameters.back();
  };
  const Tensor first = parameter({8, 4, 1, 1}), second = parameter({8, 8, 3, 3}), beside = parameter({8, 4, 1, 1}),
               third = parameter({8, 8, 1, 1});
  const std::vector<Tensor> scales = {parameter({8}), parameter({8}), parameter({8}), parameter({8})},
                            shifts = {parameter({8}), parameter({8}), parameter({8}), parameter({8})};
  const Tensor running_mean = zeros({8}, DType::kF32, device), running_variance = ones({8}, DType::kF32, device);
  const auto body = [&](const Tensor& in) {
    for (const Tensor& p : parameters) set_gradient(p, {});
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      const auto norm = [&](const Tensor& x, size_t i) {
        return batch_norm(x, i == 0 ? running_mean : Tensor(), i == 0 ? running_variance : Tensor(), scales[i],
                          shifts[i], true);
      };
      const Tensor x = relu(norm(conv2d(in, first), 0));
      const Tensor main = norm(conv2d(x, second, {}, 1, 1), 1), y = relu(main + norm(conv2d(in, beside), 2));
      loss = mean(square(to(relu(norm(conv2d(y, third), 3) + y), DType::kF32)));
    }
    backward(loss);
    std::vector<Tensor> results = {detach(loss)};
    for (const Tensor& p : parameters) results.push_back(gradient(p));
    results.push_back(running_mean);
    return results;
  };
  std::string text;
  auto step = compile([&](const std::vector<Tensor>& in) { return body(in[0]); },
                      {.whole_graph = true, .backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
                         auto program = fuse_and_compile(std::move(graph));
                         text = graph::print(program->graph());
                         return program;
                       }});
  const Tensor in = permute(made({3, 5, 6, 4}, 1, device), {0, 3, 1, 2});
  std::vector<std::vector<float>> expected;
  for (const Tensor& one : body(in)) expected.push_back(values(one));
  fill_(running_mean, 0);
  fill_(running_variance, 1);
  const std::vector<Tensor> found = step(std::vector<Tensor>{in});
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(values(found[i]), expected[i]) << i;
  for (const char* const row : {" batch_norm_relu(", " batch_norm_relu_backward(", " relu_batch_norm_backward("})
    EXPECT_NE(text.find(row), std::string::npos) << row << " is not in\n" << text;
  for (const char* const row : {" relu(", " relu_backward("})
    EXPECT_EQ(text.find(row), std::string::npos) << row << " is in\n" << text;
}

// A graph does not cross devices: it ends before a tensor moves.
TEST_F(DeviceGraphs, ItEndsWhereATensorMoves) {
  const auto f = [](const std::vector<Tensor>& in) {
    const Tensor there = to(mul(in[0], 2.0), sim_device(1));
    return std::vector{add(there, in[1])};
  };
  const std::vector<Tensor> in{made({3}, 1, sim_device(0)), made({3}, 2, sim_device(1))};
  auto step = compile(f, {});
  EXPECT_EQ(values(step(in)[0]), values(f(in)[0]));
  EXPECT_EQ(step(in)[0].device(), sim_device(1));
  EXPECT_EQ(step.frame().report().graphs.size(), 2u);
  EXPECT_NE(step.frame().report().text().find("it moves a tensor to another device"), std::string::npos)
      << step.frame().report().text();
}

// spec: test_cuda__exchange_device
TEST_F(DeviceGraphs, TheCurrentDeviceIsAGuard) {
  const auto f = [](const Tensor& x) {
    const int before = current_device().index;
    const DeviceScope swapped(sim_device(0));
    return sin(add(x, static_cast<double>(before)));
  };
  auto step = compile(f, {.whole_graph = true});
  const Tensor x = made({2, 2}, 1, sim_device(0));
  {
    const DeviceScope scope(sim_device(0));
    EXPECT_EQ(values(step(x)), values(f(x)));
    EXPECT_EQ(current_device(), sim_device(0));
  }
  EXPECT_EQ(step.frame().report().compiles, 1);
  {
    const DeviceScope scope(sim_device(1));
    EXPECT_EQ(values(step(x)), values(f(x)));
    EXPECT_NE(values(step(x)), values(sin(x)));
    EXPECT_EQ(current_device(), sim_device(1));
  }
  EXPECT_EQ(step.frame().report().compiles, 2);
}

// spec: test_gpu_current_device
TEST_F(DeviceGraphs, TensorsAreMadeOnTheCurrentDevice) {
  const auto f = [](const Tensor& x) {
    const Tensor y = zeros({2, 3});
    copy_(y, x);
    return sin(add(y, static_cast<double>(current_device().index)));
  };
  auto step = compile(f, {.whole_graph = true});
  for (int index = 0; index < 2; ++index) {
    const DeviceScope scope(sim_device(index));
    const Tensor x = made({2, 3}, 3, sim_device(index)), y = step(x);
    EXPECT_EQ(y.device(), sim_device(index));
    EXPECT_EQ(values(y), values(f(x)));
    EXPECT_EQ(step.frame().report().compiles, index + 1);
  }
}

// spec: test_constant_tensor_device_guards
TEST_F(DeviceGraphs, ConstantsAreMadeOnTheCurrentDeviceAlsoFromTheCache) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const auto f = [] { return full({1}, 5.0, DType::kF32); };
  auto step = compile(f, {.whole_graph = true, .backend = fused({.cache = &cache})});
  for (int index = 0; index < 2; ++index) {
    const DeviceScope scope(sim_device(index));
    const Tensor y = step();
    EXPECT_EQ(y.device(), sim_device(index));
    EXPECT_EQ(values(y), std::vector<float>{5});
    step.frame().reset();  // what the process knows; the folder stays
  }
}

// spec: test_get_current_stream_return_no_index, test_get_current_stream_return_different_device
TEST_F(DeviceGraphs, StreamsThatAFunctionChoosesAreThoseOfAnEagerCall) {
  const Stream first = make_stream(sim_device(0)), second = make_stream(sim_device(1));
  std::vector<Stream> found;
  const auto f = [&](const Tensor& x) {
    const DeviceScope on_second(sim_device(1));
    const StreamScope scope(second);
    const DeviceScope on_first(sim_device(0));
    const StreamScope inner(first);
    found = {current_stream(current_device()), current_stream(sim_device(1))};
    return add(x, 1.0);
  };
  const Tensor x = made({3}, 1, sim_device(0));
  const auto values_of = [&](const Tensor& y) {
    synchronize(sim_device(0));  // it was made on another stream than this thread's
    return values(y);
  };
  synchronize(sim_device(0));
  const auto eager = values_of(f(x));
  const std::vector<Stream> expected = std::exchange(found, {});
  EXPECT_EQ(expected, (std::vector<Stream>{first, second}));
  for (const bool whole : {true, false}) {
    auto step = compile(f, {.whole_graph = whole});
    EXPECT_EQ(values_of(step(x)), eager);
    EXPECT_EQ(found, expected) << whole;
    found.clear();
  }
}

// spec: test_new_event_api
TEST_F(DeviceGraphs, ABackendMayMakeEventsOfAnotherDevice) {
  Event first, second;
  const Stream stream = make_stream(sim_device(1));
  int calls = 0;
  const compiled::Backend backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
    ++calls;
    first.record(stream);
    second.record(make_stream(sim_device(1)));
    return std::make_shared<const graph::Program>(std::move(graph));
  };
  auto step = compile([](const Tensor& x) { return add(x, 1.0); }, {.whole_graph = true, .backend = backend});
  const Tensor x = made({4}, 1, sim_device(0));
  EXPECT_EQ(values(step(x)), values(add(x, 1.0)));
  EXPECT_EQ(calls, 1);
  first.synchronize();
  second.synchronize();
  EXPECT_TRUE(first.done());
  EXPECT_TRUE(second.done());
}

// spec: test_device_guard
TEST_F(DeviceGraphs, AScopeOfADeviceKnowsWhatItSetsAndWhatItPutsBack) {
  const DeviceScope outer(sim_device(0));
  EXPECT_EQ(current_device(), sim_device(0));
  {
    const DeviceScope scope(sim_device(1));
    EXPECT_EQ(current_device(), sim_device(1));
    { const DeviceScope inner(kCpu); }
    EXPECT_EQ(current_device(), sim_device(1));
    EXPECT_EQ(scope.before(), sim_device(0));
    EXPECT_EQ(scope.device(), sim_device(1));
  }
  EXPECT_EQ(current_device(), sim_device(0));
  EXPECT_EQ(outer.device(), sim_device(0));
  EXPECT_EQ(outer.before(), kCpu);
}

// spec: test_gpu_set_device
TEST_F(DeviceGraphs, ChangingTheDeviceIsABreak) {
  const auto f = [] {
    const Tensor y = ones({2});
    set_device(sim_device(1));
    return add(y, 1.0);
  };
  auto step = compile(f);
  for (int call = 0; call < 2; ++call) {
    const DeviceScope scope(sim_device(0));
    const Tensor y = step();
    EXPECT_EQ(y.device(), sim_device(0));
    EXPECT_EQ(values(y), (std::vector<float>{2, 2}));
    EXPECT_EQ(current_device(), sim_device(1));
  }
  EXPECT_EQ(current_device(), kCpu);
  const compiled::Report report = explain(step);
  EXPECT_EQ(report.compiles, 2);
  ASSERT_EQ(report.breaks.size(), 2u) << "one in each call";
  EXPECT_NE(report.breaks[0].find("set_device"), std::string::npos) << report.breaks[0];
  auto whole = compile(f, {.whole_graph = true});
  const DeviceScope scope(sim_device(0));
  EXPECT_THROW(whole(), StateError);
}

// The size is in no shape of the graph, only in where its result is.
// spec: test_symint_as_device_kwarg_multi_gpu
TEST_F(DeviceGraphs, ASizeMayChooseTheDevice) {
  const auto f = [](const Tensor& rank) {
    return ones({10}, DType::kF32, sim_device(static_cast<int>(rank.size(0)) - 2));
  };
  for (const Dynamic dynamic : {Dynamic::kAutomatic, Dynamic::kAlways}) {
    auto step = compile(f, {.whole_graph = true, .dynamic = dynamic});
    for (const int64_t size : {2, 3, 2}) {
      const Tensor y = step(zeros({size}));
      EXPECT_EQ(y.device(), sim_device(static_cast<int>(size) - 2));
      EXPECT_EQ(values(y), values(f(zeros({size}))));
    }
    const compiled::Report report = explain(step);
    EXPECT_EQ(report.compiles, 2);
    ASSERT_EQ(report.recompiles.size(), 1u);
    EXPECT_NE(report.recompiles[0].find("tensor 'arg 0' size mismatch at index 0"), std::string::npos)
        << report.recompiles[0];
  }
}

}  // namespace
}  // namespace chorale::codegen
