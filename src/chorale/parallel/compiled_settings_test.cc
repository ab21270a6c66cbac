// Compiled functions around parallel modules: what is set on the wrapper, options by stretch, and tensor parallel ones.
#include <gmock/gmock.h>

#include <cmath>
#include <optional>

#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/parallel/tensor_parallel.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

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
      return found;
    };
    EXPECT_EQ(train(true), train(false));
  });
}

// |a - b| <= 1e-4 + 1e-4 |b|, and equal dtypes.
void expect_p4(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  const auto x = a.to_vector<float>(), y = b.to_vector<float>();
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::abs(x[i] - y[i]), 1e-4 + 1e-4 * std::abs(y[i])) << i;
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

struct Split : nn::Module {
  Linear a{64, 128}, b{128, 64}, c{64, 128}, d{128, 64};
  CHORALE_MODULE(Split, a, b, c, d)
  Tensor forward(const Tensor& x) {
    const Tensor h = x + b(relu(a(x)));
    return h * 2 + d(tanh(c(h)));
  }
};

// What a rank begins to send is waited for in the graph, before it is read.
TEST(CompiledTensorParallel, WaitsForEveryCollectiveThatItBegins) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    Split model;
    const Mesh mesh(group, {2}, {"tp"});
    tensor_parallel(model, mesh["tp"], {{"[ac]", Colwise{}}, {"[bd]", Rowwise{}}});
    const NoGrad quiet;
    const auto forward = [&](const Tensor& in) { return sum(square(model(in))); };
    auto f = compile(forward);
    for (int call = 0; call < 3; ++call) {
      const Tensor x = pattern({32, 64}, call);
      EXPECT_EQ(f(x).item<float>(), forward(x).item<float>()) << call;
    }
    const std::string text = explain(f).graphs[0].text;
    size_t begun = 0;
    for (size_t at = text.find(" = collective_start("); at != std::string::npos;
         at = text.find(" = collective_start(", at + 1)) {
      ++begun;
      const size_t start = text.rfind('%', at);  // "%16: f32[32, 64] = collective_start(…"
      const std::string name = text.substr(start, text.find(':', start) - start);
      EXPECT_NE(text.find("collective_wait(" + name + ")"), std::string::npos) << name << " in " << text;
    }
    EXPECT_EQ(begun, 2u);
  });
}

}  // namespace
}  // namespace chorale::parallel
