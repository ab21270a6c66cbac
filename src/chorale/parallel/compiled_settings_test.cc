// Compiled functions around data-parallel modules: what is set on the wrapper, and options by stretch.
#include <gmock/gmock.h>

#include <cmath>
#include <optional>

#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using testing::HasSubstr;

// Two micro-batches of three are not averaged. The graph that was traced first is one of these.
TEST(CompiledSettings, WholeGraphsAverageGradientsOutsideOfNoSyncOnly) {
  run_ranks(2, [](comm::Group& group) {
    const auto train = [&](bool compiled) {
      manual_seed(3);
      DistributedDataParallel ddp(Linear(10, 10), group);
      const auto micro_batch = [&](const Tensor& x) {
        const Tensor loss = sum(square(ddp(x)));
        backward(loss);
        return loss;
      };
      auto f = compile(micro_batch, {.whole_graph = true});
      std::vector<std::vector<float>> found;
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        for (int part = 0; part < 3; ++part) {
          std::optional<DataParallelBase::NoSync> scope;
          if (part < 2) scope.emplace(ddp);
          const Tensor x = pattern({4, 10}, 10 * group.rank() + 3 * step + part);
          compiled ? f(x) : micro_batch(x);
        }
        found.push_back(gradient(ddp.module().weight).to_vector<float>());
      }
      EXPECT_EQ(explain(f).compiles, compiled ? 3 : 0) << "with and without a gradient from before, and averaged";
      return found;
    };
    EXPECT_EQ(train(true), train(false));
  });
}

struct TwoHalves : nn::Module {
  Linear a{512, 512}, b{512, 512};
  CHORALE_MODULE(TwoHalves, a, b)
  Tensor forward(const Tensor& x) {
    const Tensor y = tanh(a(x)) * 2;
    break_graph("looked at");
    return tanh(b(y)) * 2;
  }
};

// Gradients of a backward inside of a segmented function have their bytes before they are sent.
TEST(CompiledSettings, SegmentedStepsAverageTheirGradients) {
  run_ranks(2, [](comm::Group& group) {
    for (const bool looks : {false, true}) {
      const auto train = [&](bool compiled) {
        DistributedDataParallel ddp(seeded(TwoHalves(), 3), group);
        const auto step = [&](const Tensor& x) {
          Tensor y = ddp(x);
          if (looks) break_graph("looked at");
          const Tensor loss = sum(square(y * 3));
          if (looks) break_graph("looked at");
          backward(loss);
          const NoGrad quiet;
          for (const Tensor& p : ddp.module().parameters()) {
            sub_(p, mul(gradient(p), 1e-6));
            set_gradient(p, {});
          }
          return loss;
        };
        auto f = compile(step);
        std::vector<std::vector<float>> found;
        for (int at = 0; at < 3; ++at) {
          const Tensor x = pattern({2, 512}, 10 * group.rank() + at);
          found.push_back((compiled ? f(x) : step(x)).to_vector<float>());
        }
        for (const Tensor& p : ddp.module().parameters()) found.push_back(p.to_vector<float>());
        return found;
      };
      EXPECT_EQ(train(true), train(false)) << looks;
    }
  });
}

// A step that was traced outside of join() is no step for inside of it, where other ranks are told of it.
TEST(CompiledSettings, WholeGraphsAreTracedAgainInsideOfJoin) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    DistributedDataParallel ddp(Linear(4, 4), group);
    auto f = compile(
        [&](const Tensor& x) {
          ddp.zero_grad();
          const Tensor loss = sum(square(ddp(x)));
          backward(loss);
          return loss;
        },
        {.whole_graph = true});
    const Tensor x = pattern({2, 4}, group.rank());
    for (int call = 0; call < 3; ++call) f(x);
    EXPECT_THAT(message_of<StateError>([&] { join({&ddp}, {}, [&] { f(x); }); }),
                HasSubstr("join() is no part of whole graphs"));
    f(x);
    EXPECT_EQ(explain(f).compiles, 2) << "with and without a gradient from before";
  });
}

// |a - b| <= 1e-4 + 1e-4 |b|, and equal dtypes.
void expect_p4(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  const auto x = a.to_vector<float>(), y = b.to_vector<float>();
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::abs(x[i] - y[i]), 1e-4 + 1e-4 * std::abs(y[i])) << i;
}

// Upstream turns replay off in frames behind the first; here it is generated kernels.
// spec: test_inductor_config_override_with_ddp
TEST(CompiledSettings, OptionsOfAStretchReachItsPieces) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    TwoHalves eager, other = nn::clone(eager);
    DistributedDataParallel ddp(std::move(other), group, {.bucket_cap_mb = 1});
    const Tensor x = pattern({20, 512}, group.rank()), expected = eager(x);
    backward(sum(expected));
    bool everywhere = true;
    std::vector<std::pair<size_t, bool>> forward, backward_graphs;  // stretch, whether kernels are generated
    const compiled::Backend backend = [&, generated = codegen::fused()](graph::Graph graph,
                                                                        const compiled::GraphInfo& info) {
      EXPECT_EQ(info.pieces, 1u);
      auto program = everywhere || info.stretch == 0 ? generated(std::move(graph), info)
                                                     : compiled::joint_eager()(std::move(graph), info);
      (info.is_backward ? backward_graphs : forward).emplace_back(info.stretch, !program->maker().empty());
      return program;
    };
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = backend});
    for (const bool all : {true, false}) {
      everywhere = all;
      forward.clear();
      backward_graphs.clear();
      f.frame().reset();
      ddp.zero_grad();
      const Tensor y = f(x);
      expect_p4(y, expected);
      backward(sum(y));
      using Seen = std::vector<std::pair<size_t, bool>>;
      EXPECT_EQ(forward, (Seen{{0, true}, {1, all}}));
      EXPECT_EQ(backward_graphs, (Seen{{1, all}, {0, true}}));
      EXPECT_THAT(explain(f).break_reasons(), testing::Contains("looked at"));
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
