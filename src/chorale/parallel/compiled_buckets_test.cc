// What the splitter of compiled data-parallel modules charges, and what it says.
#include <gmock/gmock.h>

#include "chorale/api/compile.h"
#include "chorale/base/debug_level.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using testing::HasSubstr;
using testing::Not;

struct ThreeLayers : nn::Module {
  Linear a{10, 64}, b{64, 64}, c{64, 5};
  CHORALE_MODULE(ThreeLayers, a, b, c)
  Tensor forward(const Tensor& x) { return c(relu(b(relu(a(x))))); }
};

// What was cut is said, with CHORALE_DEBUG=INFO down to the names of parameters.
TEST(CompiledBuckets, AreNamed) {
  const DebugLevel before = debug_level();
  for (const bool more : {false, true}) {
    testing::internal::CaptureStderr();
    run_ranks(1, [&](comm::Group& group) {
      set_debug_level(more ? DebugLevel::kInfo : DebugLevel::kOff);
      DistributedDataParallel ddp(ThreeLayers(), group, {.bucket_cap_mb = 0.016});
      auto f = compile([&](const Tensor& in) { return ddp(in); }, {.name = "layers"});
      f(uniform({20, 10}));
      auto without = compile([](const Tensor& in) { return add(in, 1); }, {.name = "nothing"});
      const graph::ActiveDdp module;
      const graph::ActiveDdpScope active(module);
      without(uniform({3}));
    });
    set_debug_level(before);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, HasSubstr("[compile] layers: DDPOptimizer cut it at 2 buckets, cap 16777 bytes"));
    EXPECT_THAT(said, Not(HasSubstr("more ops than its cap says")));
    for (const char* detail :
         {"[compile] layers: bucket 0: 17940 bytes: c.weight c.bias b.weight b.bias",
          "[compile] layers: bucket 1: 2816 bytes: a.weight a.bias", "[compile] nothing: DDPOptimizer captured no"}) {
      EXPECT_EQ(said.find(detail) != std::string::npos, more) << detail;
    }
  }
}

// A bucket that nothing outside reads from goes on filling; that is a warning.
TEST(CompiledBuckets, ThatGrowBeyondTheirCapAreNamed) {
  const Tensor u = set_requires_grad(uniform({512, 512})), v = set_requires_grad(uniform({512, 512}));
  const Tensor w = set_requires_grad(uniform({512, 512})), x = uniform({2, 512}), state = zeros({2, 512});
  const graph::ActiveDdp module{.cap = 1 << 20};
  const graph::ActiveDdpScope active(module);
  const auto body = [&](const Tensor& in) {
    const Tensor y = matmul(matmul(in, u), v);
    const NoGrad quiet;
    add_(state, matmul(y, w));  // nobody reads it here
    return y;
  };
  testing::internal::CaptureStderr();
  auto f = compile(body, {.name = "grown"});
  const std::vector<float> made = f(x).to_vector<float>(), written = state.to_vector<float>();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("[compile] grown: bucket 0 took"));
  ASSERT_EQ(explain(f).graphs.size(), 2u);
  EXPECT_EQ(explain(f).graphs[1].bucket_bytes, 2 << 20);
  zero_(state);
  EXPECT_EQ(made, body(x).to_vector<float>());
  EXPECT_EQ(written, state.to_vector<float>());
}

// Frozen parameters and buffers are in no bucket; a parameter that is part of a larger tensor is charged with all of
// it.
TEST(CompiledBuckets, HoldWhatIsLearntWithAllOfItsStorage) {
  const Tensor all = zeros({3, 64, 64}), part = set_requires_grad(select(all, 0, 1));
  const Tensor frozen = uniform({64, 64}), buffer = uniform({64});
  const graph::ActiveDdp module;
  const graph::ActiveDdpScope active(module);
  auto f = compile([&](const Tensor& x) { return add(matmul(matmul(x, part), frozen), buffer); });
  f(uniform({2, 64}));
  ASSERT_EQ(explain(f).graphs.size(), 1u);
  EXPECT_EQ(explain(f).graphs[0].bucket_bytes, 3 * 64 * 64 * 4);
}

}  // namespace
}  // namespace chorale::parallel
