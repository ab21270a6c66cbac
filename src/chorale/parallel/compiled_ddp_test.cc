// Compiled functions and data-parallel training: the splitter, and what ranks compute.
#include <gmock/gmock.h>

#include "chorale/api/compile.h"
#include "chorale/autograd/checkpoint.h"
#include "chorale/nn/attention.h"
#include "chorale/nn/init.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using compiled::GraphInfo;
using testing::Each;
using testing::HasSubstr;

// Linear and ReLU, four times. Weights: Xavier's; biases 0.01.
struct Toy : nn::Module {
  Linear a, b, c, d;
  CHORALE_MODULE(Toy, a, b, c, d)
  Toy(int64_t in, int64_t hidden, int64_t out) : a(in, hidden), b(hidden, hidden), c(hidden, hidden), d(hidden, out) {
    const NoGrad quiet;
    for (Linear* linear : {&a, &b, &c, &d}) {
      nn::init::xavier_uniform_(linear->weight);
      fill_(linear->bias, 0.01);
    }
  }
  Tensor forward(const Tensor& x) { return relu(d(relu(c(relu(b(relu(a(x)))))))); }
};

// |a - b| <= 1e-4 + 1e-4 |b|, and equal dtypes.
void expect_parity(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  ASSERT_EQ(a.sizes(), b.sizes());
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::abs(x[i] - y[i]), 1e-4 + 1e-4 * std::abs(y[i])) << i;
}

// Counts the forward graphs that it is given.
compiled::Backend counting(int& forward, int* backward = nullptr) {
  return [&forward, backward, run = compiled::joint_eager()](graph::Graph graph, const GraphInfo& info) {
    graph::verify(graph);
    EXPECT_EQ(graph::print(graph::parse(graph::print(graph))), graph::print(graph));
    ++(info.is_backward && backward ? *backward : forward);
    return run(std::move(graph), info);
  };
}

std::vector<int64_t> bucket_bytes(const compiled::Report& report) {
  std::vector<int64_t> bytes;
  for (const auto& graph : report.graphs) bytes.push_back(graph.bucket_bytes);
  return bytes;
}
using Bytes = std::vector<int64_t>;

// spec: test_ddp_baseline_aot_eager
TEST(CompiledDdp, WithoutTheSplitterIsOneGraph) {
  run_ranks(1, [](comm::Group& group) {
    Toy toy(10, 64, 5);
    const Tensor x = uniform({20, 10}), expected = toy(x);
    DistributedDataParallel ddp(toy, group);
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.split = false});
    expect_parity(f(x), expected);
    EXPECT_EQ(explain(f).graphs.size(), 1u);
  });
}

// spec: test_graph_split
TEST(CompiledDdp, IsCutAtItsBuckets) {
  run_ranks(1, [](comm::Group& group) {
    Toy toy(10, 5000, 5);
    const Tensor x = uniform({20, 10}), expected = toy(x);
    DistributedDataParallel ddp(toy, group, {.bucket_cap_mb = 25});
    int graphs = 0;
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = counting(graphs)});
    expect_parity(f(x), expected);
    EXPECT_EQ(graphs, 3);
    const compiled::Report report = explain(f);
    EXPECT_EQ(bucket_bytes(report), (Bytes{220000, 100020000, 100120020}));
    EXPECT_EQ(report.break_reasons().size(), 3u);
    EXPECT_THAT(report.break_reasons(), Each(HasSubstr("DDPOptimizer")));
    // Bucket 0 is the last one of the forward pass, the first to be ready.
    EXPECT_THAT(report.break_reasons().back(), HasSubstr("bucket 0 of 3"));
    EXPECT_TRUE(report.graphs[2].bucket[0].is(toy.d.weight));
  });
}

// spec: test_graph_split_ctx_manager
TEST(CompiledDdp, ModesReachEveryPiece) {
  run_ranks(1, [](comm::Group& group) {
    Toy toy(1000, 1000, 1000);
    const Tensor x = uniform({20, 1000});
    DistributedDataParallel ddp(toy, group, {.bucket_cap_mb = 3.5});
    for (const bool counts : {true, false}) {
      for (const int mode : {0, 1, 2}) {
        const auto forward = [&](const Tensor& in) {
          std::optional<Autocast> autocast;
          std::optional<NoGrad> quiet;
          if (mode == 0) autocast.emplace(DType::kBF16);
          if (mode == 2) quiet.emplace();
          return ddp(in);
        };
        int graphs = 0;
        CompileOptions options;
        if (counts) options.backend = counting(graphs);
        auto f = compile(forward, options);
        const Tensor y = f(x), expected = forward(x);
        expect_parity(y, expected);
        if (counts) {
          EXPECT_EQ(graphs, 4);
        }
        EXPECT_EQ(explain(f).break_reasons().size(), 4u);
        EXPECT_THAT(explain(f).break_reasons(), Each(HasSubstr("DDPOptimizer")));
        EXPECT_EQ(y.dtype(), mode == 0 ? DType::kBF16 : DType::kF32);
        EXPECT_EQ(requires_grad(y), mode != 2);
      }
    }
  });
}

// spec: test_no_split
TEST(CompiledDdp, OneBucketIsTheGraphItself) {
  run_ranks(1, [](comm::Group& group) {
    Toy toy(10, 5, 5);
    const Tensor x = uniform({20, 10}), expected = toy(x);
    DistributedDataParallel ddp(toy, group, {.bucket_cap_mb = 250});
    int graphs = 0;
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.backend = counting(graphs)});
    expect_parity(f(x), expected);
    EXPECT_EQ(graphs, 1);
    EXPECT_EQ(bucket_bytes(explain(f)), Bytes{580});
  });
}

// spec: test_aot_autograd
TEST(CompiledDdp, BackwardGoesThroughAllPieces) {
  run_ranks(1, [](comm::Group& group) {
    Toy toy(10, 5000, 5), other = nn::clone(toy);
    const Tensor x = uniform({20, 10});
    DistributedDataParallel ddp(toy, group, {.bucket_cap_mb = 25});
    auto f = compile([&](const Tensor& in) { return ddp(in); });
    const Tensor y = f(x), expected = other(x);
    expect_parity(y, expected);
    backward(sum(y));
    backward(sum(expected));
    EXPECT_EQ(explain(f).graphs.size(), 3u);
    expect_parity(gradient(toy.d.weight), gradient(other.d.weight));
    expect_parity(gradient(toy.a.weight), gradient(other.a.weight));
    expect_parity(gradient(toy.b.bias), gradient(other.b.bias));
  });
}

struct Custom : nn::Module {
  Linear first{512, 512};
  nn::Parameter weight{uniform({512, 512})};
  Linear last{512, 512};
  CHORALE_MODULE(Custom, first, weight, last)
  Tensor forward(const Tensor& x, const Tensor& y) {
    Tensor z = relu(first(add(x, y)));
    z = matmul(z, t(weight));
    z = relu(add(z, where(lt(z, 0.5), full_like(z, 0.3), full_like(z, 0.6))));
    return relu(last(z));
  }
};

// spec: test_custom_layer
TEST(CompiledDdp, AParameterBehindAViewIsChargedWhereTheViewIs) {
  run_ranks(1, [](comm::Group& group) {
    Custom custom;
    const Tensor x = uniform({512, 512}), expected = custom(x, x);
    DistributedDataParallel ddp(custom, group, {.bucket_cap_mb = 1});
    int graphs = 0;
    auto f = compile([&](const Tensor& a, const Tensor& b) { return ddp(a, b); }, {.backend = counting(graphs)});
    expect_parity(f(x, x), expected);
    EXPECT_EQ(graphs, 3);
    EXPECT_EQ(bucket_bytes(explain(f)), (Bytes{1050624, 1048576, 1050624}));
  });
}

// spec: test_ignored_parameters
TEST(CompiledDdp, IgnoredParametersAreInNoBucket) {
  run_ranks(1, [](comm::Group& group) {
    Custom custom;
    const Tensor x = uniform({512, 512}), expected = custom(x, x);
    DistributedDataParallel ddp(custom, group, {.bucket_cap_mb = 25, .ignore = {"weight", "last.bias"}});
    int graphs = 0;
    auto f = compile([&](const Tensor& a, const Tensor& b) { return ddp(a, b); }, {.backend = counting(graphs)});
    expect_parity(f(x, x), expected);
    EXPECT_EQ(graphs, 2);
    EXPECT_EQ(bucket_bytes(explain(f)), (Bytes{1050624, 1048576}));
    for (const auto& graph : explain(f).graphs) {
      for (const Tensor& parameter : graph.bucket) {
        EXPECT_FALSE(parameter.is(custom.weight) || parameter.is(custom.last.bias));
      }
    }
  });
}

// spec: test_issue90375
TEST(FakeDdp, AModuleWithoutInputsAndParametersIsOnePiece) {
  const graph::ActiveDdp module;
  const graph::ActiveDdpScope active(module);
  auto f = compile([] { return mul(uniform({3}), uniform({3})); });
  manual_seed(3);
  const Tensor y = f();
  manual_seed(3);
  EXPECT_EQ(y.to_vector<float>(), mul(uniform({3}), uniform({3})).to_vector<float>());
  ASSERT_EQ(explain(f).graphs.size(), 1u);
  EXPECT_TRUE(explain(f).graphs[0].bucket.empty());
}

struct Block : nn::Module {
  nn::LayerNorm norm{96};
  nn::MultiheadAttention attention{96, 4, {.batch_first = true}};
  CHORALE_MODULE(Block, norm, attention)
  Tensor forward(const Tensor& x) {
    const Tensor y = norm.forward(x);
    return add(x, attention.forward(y, y, y).output);
  }
};

// Modules that are called through a member function of theirs are charged like any other.
// spec: test_call_method_forward
TEST(FakeDdp, ModulesThatAreReachedIndirectlyAreCharged) {
  Block blocks[2];
  const auto model = [&](const Tensor& x) {
    Tensor y = x;
    for (Block& block : blocks) {
      const auto call = &Block::forward;
      y = reshape((block.*call)(reshape(y, {-1, 100, 96})), x.sizes());
    }
    return y;
  };
  const Tensor x = uniform({2, 129, 100, 96}), expected = model(x);
  const graph::ActiveDdp module;
  const graph::ActiveDdpScope active(module);
  auto f = compile(model);
  expect_parity(f(x), expected);
  EXPECT_EQ(bucket_bytes(explain(f)), Bytes{299520});
}

struct Pair : nn::Module {
  Linear a{1000, 1000}, b{1000, 1000};
  CHORALE_MODULE(Pair, a, b)
  Tensor forward(const Tensor& x) { return b(a(x)); }
};
struct Pairs : nn::Module {
  Pair first, second;
  CheckpointPolicy keeps{};
  CHORALE_MODULE(Pairs, first, second)
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Pair* pair : {&first, &second}) {
      y = cos(checkpoint([pair](const std::vector<Tensor>& in) { return std::vector<Tensor>{(*pair)(in[0])}; }, {y},
                         keeps)[0]);
    }
    return y;
  }
};

// A checkpointed part is never cut: all of its parameters are charged at once.
// spec: test_higher_order_op
TEST(CompiledDdp, ACheckpointedPartIsOnePiece) {
  run_ranks(1, [](comm::Group& group) {
    Pairs pairs, other = nn::clone(pairs);
    const Tensor x = set_requires_grad(uniform({1000, 1000})), same = set_requires_grad(clone(detach(x)));
    DistributedDataParallel ddp(pairs, group, {.bucket_cap_mb = 1});
    auto f = compile([&](const Tensor& in) { return ddp(in); });
    const Tensor y = f(x), expected = other(same);
    expect_parity(y, expected);
    EXPECT_EQ(bucket_bytes(explain(f)), (Bytes{8008000, 8008000}));
    backward(mean(y));
    backward(mean(expected));
    expect_parity(gradient(x), gradient(same));
    expect_parity(gradient(pairs.first.a.weight), gradient(other.first.a.weight));
    expect_parity(gradient(pairs.second.b.bias), gradient(other.second.b.bias));
  });
}

// Policies are asked while the joint graph is traced, in every piece.
// spec: test_selective_activation_checkpoint
TEST(CompiledDdp, APolicyOfACheckpointIsAskedInEveryPiece) {
  run_ranks(1, [](comm::Group& group) {
    for (const bool keeps_products : {false, true}) {
      Pairs pairs, other = nn::clone(pairs);
      int asked = 0;
      pairs.keeps = [&](const op::OpDef& op) {
        ++asked;
        return keeps_products && op.name == std::string("linear");
      };
      const Tensor x = uniform({20, 1000});
      DistributedDataParallel ddp(pairs, group, {.bucket_cap_mb = 1});
      auto f = compile([&](const Tensor& in) { return ddp(in); });
      const Tensor y = f(x), expected = other(x);
      expect_parity(y, expected);
      EXPECT_EQ(explain(f).graphs.size(), 2u);
      EXPECT_GT(asked, 0);
      backward(sum(y));
      backward(sum(expected));
      expect_parity(gradient(pairs.first.a.weight), gradient(other.first.a.weight));
      expect_parity(gradient(pairs.second.b.weight), gradient(other.second.b.weight));
    }
  });
}

// spec: test_nested_ddp_preserves_active_ddp_module
TEST(FakeDdp, AnInnerOneGivesWayToTheOuterAgain) {
  run_ranks(1, [](comm::Group& group) {
    DistributedDataParallel inner(Linear(10, 10), group);
    const Tensor weight = set_requires_grad(uniform({10, 10}));
    graph::ActiveDdp outer;
    EXPECT_EQ(graph::active_ddp(), nullptr);
    {
      const graph::ActiveDdpScope active(outer);
      EXPECT_EQ(graph::active_ddp(), &outer);
      {
        const graph::ActiveDdp innermost;
        const graph::ActiveDdpScope nested(innermost);
        EXPECT_EQ(graph::active_ddp(), &innermost);
      }
      EXPECT_EQ(graph::active_ddp(), &outer);
      auto f = compile([&](const Tensor& x) {
        const Tensor y = inner(x);
        EXPECT_EQ(graph::active_ddp(), &outer);
        return matmul(y, weight);
      });
      const Tensor x = uniform({4, 10});
      expect_parity(f(x), matmul(inner(x), weight));
      // The splitter looked at the inner module's graph and at the outer one's.
      ASSERT_EQ(explain(f).graphs.size(), 2u);
      EXPECT_EQ(bucket_bytes(explain(f)), (Bytes{440, 400}));
    }
    EXPECT_EQ(graph::active_ddp(), nullptr);
  });
}

// spec: test_ddp_baseline_aot_eager_multiprocess
TEST(CompiledDdp, GivesOnTwoRanksWhatTheModuleGives) {
  run_ranks(2, [](comm::Group& group) {
    Toy toy = seeded(Toy(10, 50, 5), 1);
    const Tensor x = pattern({20, 10}, group.rank()), expected = toy(x);
    DistributedDataParallel ddp(toy, group);
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.split = false});
    expect_parity(f(x), expected);
  });
}

struct Inside : nn::Module {
  Toy toy = seeded(Toy(6, 8, 3), 2);
  bool compiled;
  std::shared_ptr<Compiled<std::function<Tensor(const Tensor&)>>> f;
  CHORALE_MODULE(Inside, toy)
  explicit Inside(bool is_compiled) : compiled(is_compiled) {}
  Tensor forward(const Tensor& x) {
    if (!compiled) return toy(x);
    if (!f) {
      f = std::make_shared<Compiled<std::function<Tensor(const Tensor&)>>>([this](const Tensor& in) { return toy(in); },
                                                                           CompileOptions{});
    }
    return (*f)(x);
  }
};

// Steps of a compiled module inside of DDP, of a compiled function around it, and of both, on two and three ranks.
TEST(CompiledDdp, TrainsAsEagerDdpDoes) {
  for (const int size : {2, 3}) {
    for (const int nesting : {0, 1, 2}) {
      run_ranks(size, [nesting](comm::Group& group) {
        const auto train = [&](bool inside, bool outside) {
          DistributedDataParallel ddp(Inside(inside), group, {.bucket_cap_mb = 0.0002});
          auto f = compile([&](const Tensor& x) { return ddp(x); });
          std::vector<float> all;
          for (int step = 0; step < 4; ++step) {
            ddp.zero_grad();
            const Tensor x = pattern({5, 6}, 10 * group.rank() + step);
            backward(sum(square(outside ? f(x) : ddp(x))));
            const NoGrad quiet;
            for (const auto& [name, parameter] : ddp.module().named_parameters()) {
              sub_(parameter, mul(gradient(parameter), 0.05));
              for (const float value : parameter.template to_vector<float>()) all.push_back(value);
            }
          }
          if (outside) {
            EXPECT_EQ(explain(f).compiles, 1);
            EXPECT_GE(explain(f).graphs.size(), 3u);
          }
          return all;
        };
        EXPECT_EQ(train(nesting != 1, nesting != 0), train(false, false));
      });
    }
  }
}

struct Layers : nn::Module {
  Linear a{64, 32}, b{32, 16}, c{16, 8};
  CHORALE_MODULE(Layers, a, b, c)
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Linear* layer : {&a, &b, &c}) {
      y = checkpoint([layer](const std::vector<Tensor>& in) { return std::vector<Tensor>{(*layer)(in[0])}; }, {y})[0];
    }
    return y;
  }
};

// spec: test_ddp_activation_checkpointing
TEST(CompiledDdp, CheckpointedLayersGiveWhatEagerGives) {
  run_ranks(2, [](comm::Group& group) {
    const Tensor x = pattern({10, 64}, group.rank());
    DistributedDataParallel eager(seeded(Layers(), 1), group), ddp(seeded(Layers(), 1), group);
    auto f = compile([&](const Tensor& in) { return ddp(in); }, {.split = false});
    const Tensor y = f(x), expected = eager(x);
    expect_parity(y, expected);
    backward(sum(square(y)));
    backward(sum(square(expected)));
    expect_parity(gradient(ddp.module().a.weight), gradient(eager.module().a.weight));
  });
}

// Random numbers inside of a checkpointed part are those of its first run.
TEST(CompiledDdp, ACheckpointWithDropoutReplaysIt) {
  const Tensor w = set_requires_grad(pattern({16, 16}, 1)), x = pattern({8, 16}, 2);
  const auto program = [&](const Tensor& in) {
    return checkpoint(
        [&](const std::vector<Tensor>& operands) {
          return std::vector<Tensor>{tanh(dropout(matmul(operands[0], w), 0.5))};
        },
        {in})[0];
  };
  const auto gradients = [&](const auto& f) {
    std::vector<std::vector<float>> all;
    manual_seed(5);
    for (int i = 0; i < 3; ++i) {
      set_gradient(w, {});
      const Tensor y = f(x);
      backward(sum(square(y)));
      all.push_back(y.template to_vector<float>());
      all.push_back(gradient(w).to_vector<float>());
    }
    return all;
  };
  const auto eager = gradients(program);
  for (const bool whole : {false, true}) {
    EXPECT_EQ(gradients(compile(program, {.whole_graph = whole})), eager) << whole;
  }
}

struct Convolutions : nn::Module {
  nn::Conv2d a{46, 640, {.kernel = 3, .padding = 1, .bias = false}};
  nn::BatchNorm2d norm{640};
  nn::Conv2d b{640, 640, {.kernel = 1, .bias = false}};
  CHORALE_MODULE(Convolutions, a, norm, b)
  Tensor forward(const Tensor& x) { return b(norm(a(x))); }
};

// spec: test_ddp_optimizer_cudagraph
TEST(CompiledDdp, NothingIsCompiledAfterTheFirstIteration) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Convolutions(), group, {.bucket_cap_mb = 25});
    int forward = 0, backward_graphs = 0;
    auto f = compile([&](const Tensor& x) { return ddp(x); }, {.backend = counting(forward, &backward_graphs)});
    for (int i = 0; i < 10; ++i) {
      ddp.zero_grad();
      backward(sum(f(pattern({2, 46, 8, 8}, i))));
      EXPECT_EQ(forward, 2);
      EXPECT_EQ(backward_graphs, 2);
    }
    EXPECT_EQ(bucket_bytes(explain(f)), (Bytes{1064960, 1638400}));
  });
}

// spec: test_ddp_compile_static_graph
TEST(CompiledDdp, AStaticGraphChangesNothing) {
  run_ranks(2, [](comm::Group& group) {
    const auto train = [&](bool is_static, bool compiled) {
      DistributedDataParallel ddp(seeded(Linear(10, 10), 1), group, {.static_graph = is_static});
      std::function<Tensor(const Tensor&)> f = [&](const Tensor& x) { return ddp(x); };
      if (compiled) f = compile(f);
      std::vector<float> all;
      for (int i = 0; i < 6; ++i) {
        ddp.zero_grad();
        const Tensor y = f(pattern({4, 10}, 10 * group.rank() + i));
        backward(sum(square(y)));
        for (const float value : y.to_vector<float>()) all.push_back(value);
        for (const Tensor& parameter : {ddp.module().weight, ddp.module().bias})
          for (const float value : gradient(parameter).to_vector<float>()) all.push_back(value);
      }
      return all;
    };
    const std::vector<float> eager = train(false, false), found = train(true, true);
    EXPECT_EQ(found, train(false, true));
    ASSERT_EQ(found.size(), eager.size());
    ASSERT_EQ(found.size(), 6u * (4 * 10 + 10 * 10 + 10));
    for (size_t i = 0; i < eager.size(); ++i) EXPECT_NEAR(found[i], eager[i], 1e-4 * (1 + std::abs(eager[i])));
  });
}

}  // namespace
}  // namespace chorale::parallel
