// Ranks that compile: each as long as it takes, with the same results, and whatever happens to one of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <latch>
#include <thread>

#include "chorale/api/agreement.h"
#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/codegen/tune.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/timeout_extension.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using comm::run_processes;
using comm::run_ranks;

template <class F>
void expect_equal_compiles(const comm::Group& ranks, const Compiled<F>& f) {
  const std::string own = std::to_string(explain(f).compiles);
  for (const std::string& other : compiled::gather_texts(ranks, own)) EXPECT_EQ(other, own);
}

Tensor twice(const Tensor& x) { return sum(mul(x, 2)); }

// `compiling` is what rank 0 does while it compiles `twice`; the others know of it, or do not, and then all ranks add
// up.
void compile_on_rank_0(const std::function<void()>& compiling, bool others_know,
                       const std::function<void(comm::Group&)>& add_up) {
  run_ranks(2,
            [&](comm::Group& ranks) {
              const auto slow = [&](graph::Graph graph, const compiled::GraphInfo& info) {
                if (ranks.rank() == 0) compiling();
                return compiled::joint_eager()(std::move(graph), info);
              };
              ranks.all_reduce(ones({1})).wait();
              auto f = compile(twice, {.backend = slow});
              EXPECT_EQ(f(ones({4})).item<float>(), 8);
              if (ranks.rank() != 0 && others_know) comm::extend_timeouts(60s);
              add_up(ranks);
              if (others_know) expect_equal_compiles(ranks, f);
            },
            {.timeout = 700ms});
}

// Rank 0 compiles longer than the others wait, who know of it. Where they do not, their call fails.
// spec: test_asymmetric_compilation
TEST(CompilingRanks, WaitForOneThatCompiles) {
  compile_on_rank_0([] { std::this_thread::sleep_for(2s); }, true,
                    [](comm::Group& ranks) { ranks.all_reduce(ones({1})).wait(); });
  std::latch gave_up(1);
  compile_on_rank_0([&] { gave_up.wait(); }, false,
                    [&](comm::Group& ranks) {
                      EXPECT_THROW(ranks.all_reduce(ones({1})).wait(), CommError);
                      if (ranks.rank() == 1) gave_up.count_down();
                    });
}

fs::path slow_compiler(const TemporaryFolder& folder) {
  fs::path path = folder.write("slow", "#!/bin/sh\nsleep 3\nexec cc \"$@\"\n");
  fs::permissions(path, fs::perms::owner_all);
  return path;
}

// A rank that finds the code on disk knows how long it took to make, and gives the others that time.
// spec: test_asymmetric_compilation_with_fx_cache
TEST(CompilingRanks, ThatFindTheCodeWaitForOneThatMakesIt) {
  const TemporaryFolder folder;
  const std::string compiler = slow_compiler(folder).string();
  run_ranks(2, [&](comm::Group& world) {
    const auto cache_in = [&](const std::string& name) {
      return CodeCache({.folder = fs::path(folder.path()) / concat(name, world.rank())});
    };
    CodeCache cache = cache_in("a"), other = cache_in("b");
    const auto expect_counts = [&](int64_t miss, int64_t hit) {
      EXPECT_EQ(cache.counts().miss + other.counts().miss, miss) << world.rank();
      EXPECT_EQ(cache.counts().hit + other.counts().hit, hit) << world.rank();
      EXPECT_EQ(cache.counts().bypass + other.counts().bypass, 0) << world.rank();
    };
    // Two pointwise ops: a kernel is generated.
    const auto call = [&](CodeCache& from) {
      auto f = compile([](const Tensor& x) { return exp(mul(x, 2)); },
                       {.backend = fused({.compiler = compiler, .cache = &from})});
      EXPECT_EQ(f(zeros({4})).to_vector<float>(), (std::vector<float>{1, 1, 1, 1}));
    };
    call(cache);
    expect_counts(1, 0);
    const comm::Group ranks = world.duplicate({.timeout = 1s});
    ranks.barrier({.timeout = 60s}).wait();
    cache.forget();
    call(world.rank() == 0 ? other : cache);
    // A rank that has saved time waits longer, and no other rank does.
    EXPECT_EQ(comm::timeout_extension() >= 1s, world.rank() != 0);
    const Tensor one = ones({1});
    ranks.all_reduce(one).wait();
    EXPECT_EQ(one.item<float>(), 2);
    expect_counts(world.rank() == 0 ? 2 : 1, world.rank() == 0 ? 0 : 1);
  });
}

// What the host computes is handed out, and nothing is compiled.
// spec: test_empty_graph_inductor
TEST(CompilingRanks, AFunctionWithoutOpsHasNoGraph) {
  run_ranks(1, [&](comm::Group& ranks) {
    auto f = compile([&] { return ranks.size(); }, {.backend = fused()});
    EXPECT_EQ(f(), 1);
    EXPECT_TRUE(explain(f).graphs.empty());
    auto whole = compile([&] { return ranks.size(); }, {.whole_graph = true});
    EXPECT_EQ(whole(), 1);
    EXPECT_THROW(whole(), StateError) << "the host did not run";
  });
}

// Which group it is, is a host value that the graph depends on.
// spec: test_get_pg_attr
TEST(CompilingRanks, TheGroupThatAFunctionLooksAtIsGuarded) {
  run_ranks(2, [&](comm::Group& ranks) {
    const comm::Group outside;
    const comm::Group* group = &ranks;
    auto f = compile([&](const Tensor& x) { return group->is_member() ? sub(x, 1) : add(x, 1); },
                     {.whole_graph = true, .watch = {[&] { return reinterpret_cast<int64_t>(group); }}});
    EXPECT_EQ(f(ones({4})).to_vector<float>(), (std::vector<float>(4, 0)));
    group = &outside;
    EXPECT_EQ(f(ones({4})).to_vector<float>(), (std::vector<float>(4, 2)));
    group = &ranks;
    EXPECT_EQ(f(ones({4})).to_vector<float>(), (std::vector<float>(4, 0)));
    EXPECT_EQ(explain(f).compiles, 2);
  });
}

// ---- tuning

struct Products {
  Tensor a, b, c;
  explicit Products(int64_t n) : a(normal({n, n})), b(normal({n, 2 * n})), c(normal({2 * n, n})) {}
};
Tensor of_products(const Tensor& a, const Tensor& b, const Tensor& c) {
  return add(add(sum(add(matmul(a, b), 1)), sum(relu(matmul(b, c)))), sum(matmul(c, a)));
}

// Three products: each is measured by one rank, and all take what it found.
// spec: test_multiproc_autotune
TEST(Tuning, IsSharedByRanks) {
  for (const int size : {2, 4}) {
    run_ranks(size, [&](comm::Group& ranks) {
      const comm::Group tuning = ranks.duplicate();
      manual_seed(1);
      const Products in(128);
      std::string forms;
      int64_t measured = 0;
      const auto watching = [&](graph::Graph graph, const compiled::GraphInfo&) {
        graph::Graph fused = simplify_and_fuse(graph);
        const Tuned tuned = tune(fused, &tuning, &measured);
        EXPECT_EQ(tuned.size(), 3u);
        for (const auto form : tuned) forms += std::to_string(static_cast<int>(form));
        return fuse_and_compile(std::move(graph), {.autotune = true, .tune_with = &tuning});
      };
      auto f = compile(of_products, {.backend = watching});
      const float expected = of_products(in.a, in.b, in.c).item<float>();
      for (int call = 0; call < 2; ++call)
        EXPECT_NEAR(f(in.a, in.b, in.c).item<float>(), expected, 1e-3 * std::abs(expected) + 0.5);
      expect_equal_compiles(ranks, f);
      for (const std::string& other : compiled::gather_texts(ranks, forms)) EXPECT_EQ(other, forms);
      EXPECT_EQ(measured, (3 - ranks.rank() + size - 1) / size);
    });
  }
}

// spec: test_multiproc_autotune_dynamic_shapes
TEST(Tuning, HoldsForOtherSizes) {
  run_ranks(2, [&](comm::Group& ranks) {
    const comm::Group tuning = ranks.duplicate();
    CompileOptions options{.backend = fused({.autotune = true, .tune_with = &tuning})};
    for (size_t argument = 0; argument < 3; ++argument) {
      for (int64_t dim = 0; dim < 2; ++dim) options.dynamic_dims.push_back({argument, dim});
    }
    auto f = compile(of_products, options);
    for (const auto& [n, wide] : {std::pair<int64_t, int64_t>{128, 256}, {64, 256}}) {
      const Tensor a = normal({n, n}), b = normal({n, wide}), c = normal({wide, n});
      const float expected = of_products(a, b, c).item<float>();
      EXPECT_NEAR(f(a, b, c).item<float>(), expected, 1e-3 * std::abs(expected) + 0.5);
      EXPECT_EQ(explain(f).compiles, 1);
      expect_equal_compiles(ranks, f);
    }
  });
}

TEST(Tuning, OfDifferentGraphsIsAnError) {
  run_ranks(2, [&](comm::Group& ranks) {
    auto f = compile(
        [&](const Tensor& x) {
          const Tensor y = matmul(x, x);
          return ranks.rank() == 0 ? y : matmul(y, x);
        },
        {.backend = fused({.autotune = true, .tune_with = &ranks})});
    EXPECT_THROW(f(ones({128, 128})), StateError);
  });
}

// ---- what one rank cannot do, none does

TEST(CompilingRanks, AllRunOpByOpWhereOneHasNoCompiler) {
  run_ranks(2, [&](comm::Group& ranks) {
    const std::string compiler = ranks.rank() == 1 ? "/nowhere/cc" : "";
    auto f = compile([](const Tensor& x) { return gelu(mul(x, 3)); },
                     {.backend = fused({.compiler = compiler}), .agree = &ranks});
    const Tensor x = set_requires_grad(normal({100}));
    backward(sum(f(x)));
    EXPECT_EQ(f(x).to_vector<float>(), gelu(mul(x, 3)).to_vector<float>());
    expect_equal_compiles(ranks, f);
    // The same with a compiler everywhere: one kernel instead of two.
    const auto program_of = [&](const std::string& with) {
      graph::Graph graph =
          graph::parse("graph(%0: f32[8]) {\n  %1: f32[8] = exp(%0)\n  %2: f32[8] = tanh(%1)\n  return %2\n}\n");
      return compiled::agreeing(fused({.compiler = with}), ranks)(std::move(graph), {});
    };
    EXPECT_EQ(program_of(compiler)->kernels(), 2u);
    EXPECT_EQ(program_of("")->kernels(), 1u);
  });
}

// ---- processes

// Processes that fill one cache get what each would get alone.
TEST(CompilingProcesses, FillOneCache) {
  const fs::path folder = fs::temp_directory_path() / concat("chorale-one-cache-", ::getppid());
  const std::vector<int> ended = run_processes(3, [&](comm::Group& ranks) {
    CodeCache cache({.folder = folder});
    for (int i = 0; i < 6; ++i) {
      ranks.barrier().wait();
      auto f =
          compile([i](const Tensor& x) { return exp(mul(add(x, i), 0.5)); }, {.backend = fused({.cache = &cache})});
      const Tensor x = normal({50});
      EXPECT_EQ(f(x).to_vector<float>(), exp(mul(add(x, i), 0.5)).to_vector<float>());
    }
    EXPECT_EQ(cache.counts().hit + cache.counts().miss, 6);
    ranks.barrier().wait();
    if (ranks.rank() == 0) fs::remove_all(folder);
  });
  EXPECT_THAT(ended, testing::Each(0));
}

// A rank that is killed while it compiles is named to those that wait for its word.
TEST(CompilingProcesses, ThatDieAreNamed) {
  const std::vector<int> ended = run_processes(3, [&](comm::Group& ranks) {
    const auto deadly = [&](graph::Graph graph, const compiled::GraphInfo& info) {
      if (ranks.rank() == 1) ::raise(SIGKILL);
      return compiled::joint_eager()(std::move(graph), info);
    };
    auto f = compile(twice, {.backend = deadly, .agree = &ranks});
    const std::string message = comm::message_blaming(1, [&] { f(ones({4})); });
    EXPECT_FALSE(message.empty());
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace chorale::codegen
