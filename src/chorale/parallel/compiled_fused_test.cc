// Compiled data-parallel training with generated kernels, with ranks that see other sizes, and with attention whose
// scores are a function of the user's.
#include <gmock/gmock.h>

#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/nn/flex_attention.h"
#include "chorale/nn/init.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using testing::Each;
using testing::HasSubstr;

// |a - b| <= 1e-4 + 1e-4 |b|, and equal dtypes.
void expect_p4(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  ASSERT_EQ(a.sizes(), b.sizes());
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::abs(x[i] - y[i]), 1e-4 + 1e-4 * std::abs(y[i])) << i;
}

// The fused backend, which counts the forward graphs that it is given.
compiled::Backend counting_fused(int& forward) {
  return [&forward, run = codegen::fused()](graph::Graph graph, const compiled::GraphInfo& info) {
    forward += info.is_backward ? 0 : 1;
    return run(std::move(graph), info);
  };
}

std::vector<int64_t> bytes_of_buckets(const compiled::Report& report) {
  std::vector<int64_t> bytes;
  for (const auto& graph : report.graphs) bytes.push_back(graph.bucket_bytes);
  return bytes;
}
using Bytes = std::vector<int64_t>;

// A module whose forward pass is a compiled function.
template <class Inner>
struct Wrapped : nn::Module {
  Inner inner;
  std::function<Tensor(const Tensor&)> compiled;
  CHORALE_MODULE(Wrapped, inner)
  Wrapped(Inner from, std::function<Tensor(const Tensor&)> f) : inner(std::move(from)), compiled(std::move(f)) {}
  Tensor forward(const Tensor& x) { return compiled(x); }
};

// Linear and ReLU, four times.
struct FusedToy : nn::Module {
  Linear a, b, c, d;
  CHORALE_MODULE(FusedToy, a, b, c, d)
  FusedToy(int64_t in, int64_t hidden, int64_t out)
      : a(in, hidden), b(hidden, hidden), c(hidden, hidden), d(hidden, out) {
    const NoGrad quiet;
    for (Linear* linear : {&a, &b, &c, &d}) {
      nn::init::xavier_uniform_(linear->weight);
      fill_(linear->bias, 0.01);
    }
  }
  Tensor forward(const Tensor& x) { return relu(d(relu(c(relu(b(relu(a(x)))))))); }
};

// spec: test_ddp_baseline_inductor
TEST(FusedDdp, WithoutTheSplitterIsOneGraph) {
  run_ranks(1, [](comm::Group& group) {
    FusedToy toy(10, 64, 5);
    const Tensor x = uniform({20, 10}), expected = toy(x);
    DistributedDataParallel ddp(toy, group);
    int graphs = 0;
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = counting_fused(graphs), .split = false});
    expect_p4(f(x), expected);
    EXPECT_EQ(graphs, 1);
  });
}

// spec: test_graph_split_inductor
TEST(FusedDdp, IsCutAtItsBuckets) {
  run_ranks(1, [](comm::Group& group) {
    FusedToy toy(10, 5000, 5);
    const Tensor x = uniform({20, 10}), expected = toy(x);
    DistributedDataParallel ddp(toy, group, {.bucket_cap_mb = 25});
    int graphs = 0;
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = counting_fused(graphs)});
    expect_p4(f(x), expected);
    EXPECT_EQ(graphs, 3);
    EXPECT_EQ(bytes_of_buckets(explain(f)), (Bytes{220000, 100020000, 100120020}));
    EXPECT_THAT(explain(f).break_reasons(), Each(HasSubstr("DDPOptimizer")));
  });
}

struct PointConvolutions : nn::Module {
  nn::Conv2d a{512, 512, {.kernel = 1, .bias = false}}, b{512, 512, {.kernel = 1, .bias = false}};
  nn::Conv2d c{512, 512, {.kernel = 1, .bias = false}}, d{512, 512, {.kernel = 1, .bias = false}};
  CHORALE_MODULE(PointConvolutions, a, b, c, d)
  Tensor forward(const Tensor& x) { return relu(d(relu(c(relu(b(relu(a(x)))))))); }
};

// What one piece hands on lies as the next one was compiled for, with images whose channels come last, too.
// spec: test_graph_split_inductor_layout_optimizations_training
// spec: test_graph_split_inductor_layout_optimizations_inference
TEST(FusedDdp, LayoutsCrossPieces) {
  run_ranks(1, [](comm::Group& group) {
    PointConvolutions model = seeded(PointConvolutions(), 1);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 25});
    for (const bool training : {true, false}) {
      for (const bool channels_last : {false, true}) {
        Tensor x = pattern({2, 512, 8, 8}, 3);
        if (channels_last) x = permute(contiguous(permute(x, {0, 2, 3, 1})), {0, 3, 1, 2});
        std::optional<NoGrad> quiet;
        if (!training) quiet.emplace();
        int graphs = 0;
        auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = counting_fused(graphs)});
        const Tensor y = f(x), expected = model(x);
        expect_p4(contiguous(y), contiguous(expected));
        EXPECT_EQ(requires_grad(y), training);
        EXPECT_EQ(graphs, 2);
        EXPECT_EQ(bytes_of_buckets(explain(f)), (Bytes{3145728, 1048576}));
        if (training) backward(sum(y));
      }
    }
  });
}

struct Turned : nn::Module {
  Linear a{30, 70}, b{3500, 2048};
  CHORALE_MODULE(Turned, a, b)
  Tensor forward(const Tensor& x) { return b(flatten(a(transpose(x, 2, 1)), 1)); }
};

// The module is compiled inside of the data-parallel one. The second size of a batch makes it a symbol.
// spec: test_graph_split_inductor_transpose
TEST(FusedDdp, BatchesOfThreeSizesAreCompiledTwice) {
  run_ranks(1, [](comm::Group& group) {
    Turned model = seeded(Turned(), 2);
    int graphs = 0;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = counting_fused(graphs)});
    const Wrapped<Turned> inner(model, [&](const Tensor& x) { return f(x); });
    DistributedDataParallel ddp(inner, group, {.bucket_cap_mb = 25});
    for (const int64_t batch : {10, 20, 30}) {
      const Tensor x = pattern({batch, 30, 50}, static_cast<double>(batch));
      expect_p4(ddp(x), model(x));
      EXPECT_EQ(explain(f).compiles, batch == 10 ? 1 : 2);
    }
    EXPECT_EQ(explain(f).resizes, 1);
    EXPECT_EQ(explain(f).graphs[0].bucket_bytes, 8680);
    EXPECT_EQ(explain(f).graphs[1].bucket_bytes, 28680192);
  });
}

// Ranks with batches of other sizes compile once: what differs between them is a symbol from the start.
// spec: test_compiler_collectives_automatic_dynamic_tensor
TEST(FusedDdp, BatchesThatDifferBetweenRanksAreSymbols) {
  for (const int size : {2, 4}) {
    run_ranks(size, [](comm::Group& group) {
      const comm::Group compiling = group.duplicate();
      Linear layer = seeded(Linear(10, 2), 1);
      auto f = compile([&](const Tensor& x) { return layer(x); }, {.agree_on_sizes = &compiling});
      const Wrapped<Linear> model(layer, [&](const Tensor& x) { return f(x); });
      DistributedDataParallel ddp(model, group);
      optim::Sgd optimizer(ddp.module().named_parameters(), {.lr = 1e-3});
      for (const int64_t batch : group.rank() == 0 ? std::vector<int64_t>{5, 8, 6} : std::vector<int64_t>{6, 6, 3}) {
        optimizer.zero_grad();
        backward(cross_entropy(ddp(pattern({batch, 10}, 1)), zeros({batch}, DType::kI64)));
        optimizer.step();
      }
      EXPECT_EQ(explain(f).compiles, 1) << group.rank();
    });
  }
}

// Queries and keys from one layer, values from another; slopes of ALiBi are a buffer.
struct FlexModel : nn::Module {
  static constexpr int64_t kHeads = 12, kFeatures = 64, kWidth = kHeads * kFeatures;
  Linear qk{kWidth, 2 * kWidth}, v{kWidth, kWidth};
  nn::Buffer slopes;
  CHORALE_MODULE(FlexModel, qk, v, slopes)
  std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)> attend;

  FlexModel() : slopes(mul(arange(1, kHeads + 1, 1, DType::kF32), -8.0 / kHeads)) {}
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& value) const {
    const auto alibi = [this](const Tensor& score, const FlexPlace& at) {
      const Tensor slope = reshape(index_select(slopes, 0, flatten(at.head)), {1, kHeads, 1, 1});
      return score + mul(sub(at.q, at.kv), slope);
    };
    return flex_attention(q, k, value, {.score = alibi});
  }
  Tensor heads(const Tensor& x) const {
    return permute(view(x, {x.size(0), x.size(1), kHeads, kFeatures}), {0, 2, 1, 3});
  }
  Tensor forward(const Tensor& x) {
    const std::vector<Tensor> both = chunk(qk(x), 2, 2);
    return attend(heads(both[0]), heads(both[1]), heads(v(x)));
  }
  // The same from a bias that is written down.
  Tensor dense(const Tensor& x) const {
    const std::vector<Tensor> both = chunk(qk(x), 2, 2);
    const Tensor places = arange(x.size(1), DType::kF32);
    const Tensor bias = mul(sub(unsqueeze(places, 1), unsqueeze(places, 0)), reshape(slopes, {kHeads, 1, 1}));
    const Tensor score = add(mul(matmul(heads(both[0]), transpose(heads(both[1]), 2, 3)), 0.125), bias);
    return matmul(softmax(score, 3), heads(v(x)));
  }
};

// spec: test_compiled_flex_attention_full_model_ddp
// spec: test_compiled_flex_attention_local_ddp
TEST(FusedDdp, AttentionWithAScoreFunctionIsCutLikeAnythingElse) {
  run_ranks(1, [](comm::Group& group) {
    for (const bool also_inside : {false, true}) {
      FlexModel model = seeded(FlexModel(), 1);
      auto inside =
          compile([&](const Tensor& q, const Tensor& k, const Tensor& v) { return model.attention(q, k, v); });
      if (also_inside) {
        model.attend = [&](const Tensor& q, const Tensor& k, const Tensor& v) { return inside(q, k, v); };
      } else {
        model.attend = [&](const Tensor& q, const Tensor& k, const Tensor& v) { return model.attention(q, k, v); };
      }
      int graphs = 0;
      auto f = compile([&](const Tensor& x) { return model.forward(x); }, {.backend = counting_fused(graphs)});
      const Wrapped<FlexModel> outer(model, [&](const Tensor& x) { return f(x); });
      DistributedDataParallel ddp(outer, group, {.bucket_cap_mb = 25});
      const Tensor x = pattern({2, 24, FlexModel::kWidth}, 5);
      const Tensor y = ddp(x), expected = model.dense(x);
      expect_p4(y, expected);
      EXPECT_EQ(graphs, 2);
      EXPECT_EQ(bytes_of_buckets(explain(f)), (Bytes{4724736, 2362368}));
      EXPECT_EQ(explain(inside).compiles, 0) << "what is compiled inside of something compiled is part of it";
      backward(sum(square(y)));
      const Tensor made = gradient(model.qk.weight);
      set_gradient(model.qk.weight, {});
      backward(sum(square(expected)));
      expect_p4(made, gradient(model.qk.weight));
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
