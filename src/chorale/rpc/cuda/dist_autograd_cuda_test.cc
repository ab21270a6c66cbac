// Distributed autograd of graphs that go from a GPU to the host and back. Tensors of the host travel.
#include <gtest/gtest.h>

#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using cuda::kGpu;
using served::plus;

class CudaDistAutograd : public BothModes {
 protected:
  void SetUp() override {
    if (cuda::rehearses()) GTEST_SKIP() << "a rehearsal has no numbers";
    if (const std::string why = cuda::why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
  // The gradients of `program` in a context are those of the same program on this worker alone, three times. Its root
  // is made of leaves on the GPU and on the host; `add` is done here or by the next worker.
  using Add = std::function<Tensor(const Tensor& a, const Tensor& b)>;
  using Program = std::function<Tensor(const Add& add, const Tensor& on_gpu, const Tensor& on_host)>;
  static void expect_as_local(const Program& program) {
    run_agents(2, options({}), [&](Agent& agent, comm::Group&) {
      const StreamScope own(make_stream(kGpu));
      for (int i = 0; i < 3; ++i) {
        const Tensor there = to(pattern({3, 3}, 1 + i), kGpu), here = pattern({3, 3}, 5 + i);
        const Tensor a = wanting(there), b = wanting(here), c = wanting(there), d = wanting(here);
        backward(program(plus, a, b));
        dist_autograd::Context context(agent);
        context.backward(
            {program([&](const Tensor& x, const Tensor& y) { return agent.call<plus>(next(agent), x, y); }, c, d)});
        const Tensor of_gpu = context.gradient(c), of_host = context.gradient(d);
        EXPECT_EQ(of_gpu.device(), kGpu);
        expect_near(to(of_gpu, kCpu), to(gradient(a), kCpu), "the leaf on the GPU");
        EXPECT_EQ(of_host.defined(), gradient(b).defined());
        if (of_host.defined()) expect_near(of_host, gradient(b), "the leaf on the host");
      }
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Rpc, CudaDistAutograd, kBothModes, name_of_mode);

// spec: test_gpu_simple
TEST_P(CudaDistAutograd, ASumOnTheGpu) {
  expect_as_local([](const Add&, const Tensor& a, const Tensor&) { return sum(add(a, mul(a, a))); });
}

Tensor here(const Tensor& x) { return to(x, kCpu); }
Tensor there(const Tensor& x) { return to(x, kGpu); }

// spec: test_gpu_to_cpu_continuation
TEST_P(CudaDistAutograd, FromTheHostToTheGpuAndBack) {
  expect_as_local([](const Add& add_by, const Tensor& a, const Tensor& b) {
    const Tensor t4 = add(there(add_by(b, b)), a), t5 = add_by(here(t4), b), t6 = add(there(t5), t4);
    return sum(add_by(here(t6), t5));
  });
}

// spec: test_gpu_to_cpu_continuation_gpu_root
TEST_P(CudaDistAutograd, FromTheHostToTheGpuAndBackWithARootOnTheGpu) {
  expect_as_local([](const Add& add_by, const Tensor& a, const Tensor& b) {
    const Tensor t4 = add(there(add_by(b, b)), a), t5 = add_by(here(t4), b);
    return sum(add(there(t5), t4));
  });
}

}  // namespace
}  // namespace chorale::rpc
