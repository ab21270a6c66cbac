// Ranks that compile together make the same sizes symbols, and so compile equally often.
#include "chorale/api/shared_sizes.h"

#include <gtest/gtest.h>

#include "chorale/api/agreement.h"
#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/collective.h"

namespace chorale {
namespace {

using comm::run_ranks;

// All ranks have compiled so often.
template <class F>
void expect_compiles(const comm::Group& ranks, const Compiled<F>& f, int count) {
  const std::string own = std::to_string(explain(f).compiles);
  for (const std::string& of_rank : compiled::gather_texts(ranks, own)) {
    EXPECT_EQ(of_rank, std::to_string(count)) << "seen by rank " << ranks.rank();
  }
}

// A number that differs in the second compilation is a symbol on all ranks. The first rank's second call fits its
// graph: the others, which compile there, wait until it compiles in its third.
// spec: test_compiler_collectives_automatic_dynamic_scalar
TEST(SharedSizes, NumbersThatDifferBecomeSymbols) {
  for (const int size : {2, 4}) {
    run_ranks(size, [&](const comm::Group& ranks) {
      auto f = compile([](const Tensor& x, int64_t n) { return add(x, sum(ones({n}))); }, {.agree_on_sizes = &ranks});
      const std::vector<int64_t> numbers =
          ranks.rank() == 0 ? std::vector<int64_t>{3, 3, 7} : std::vector<int64_t>{3, 4, 9};
      for (const int64_t n : numbers) {
        EXPECT_EQ(f(zeros({5}), n).to_vector<float>(), std::vector<float>(5, static_cast<float>(n)));
      }
      expect_compiles(ranks, f, 2);
    });
  }
}

// spec: test_compiler_collectives_automatic_dynamic_speculation_divergence
TEST(SharedSizes, SizesThatDifferBetweenRanksAreSymbolsAtOnce) {
  for (const bool whole : {false, true}) {
    run_ranks(2, [&](const comm::Group& ranks) {
      auto f = compile(
          [](const Tensor& x, const Tensor& y) {
            EXPECT_EQ(x.sizes(), y.sizes());
            return add(sum(x), sum(y));
          },
          {.whole_graph = whole, .agree_on_sizes = &ranks});
      for (const int64_t n : ranks.rank() == 0 ? std::vector<int64_t>{4, 4} : std::vector<int64_t>{3, 4}) {
        EXPECT_EQ(f(ones({n}), ones({n})).item<float>(), static_cast<float>(2 * n));
      }
      expect_compiles(ranks, f, 1);
      EXPECT_EQ(explain(f).resizes, ranks.rank() == 0 ? 0 : 1);
    });
  }
}

// A break before the first op: the empty stretch is a compilation at which ranks meet, too.
// spec: test_compiler_collectives_graph_break_empty_graph_still_collective
TEST(SharedSizes, AnEmptyStretchIsACompilation) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f = compile(
        [](const Tensor& x, const Tensor& y) {
          break_graph("a line is printed");
          return add(sum(x), sum(y));
        },
        {.agree_on_sizes = &ranks});
    for (const int64_t n : ranks.rank() == 0 ? std::vector<int64_t>{5, 5, 6} : std::vector<int64_t>{3, 4, 5}) {
      EXPECT_EQ(f(ones({n}), ones({n})).item<float>(), static_cast<float>(2 * n));
    }
    expect_compiles(ranks, f, 2);
  });
}

// spec: test_compiler_collectives_dim_mismatch
TEST(SharedSizes, RanksMayHaveOtherNumbersOfDimensions) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f = compile([](const Tensor& x, const Tensor& y) { return add(sum(x), sum(y)); }, {.agree_on_sizes = &ranks});
    const Shape sizes = ranks.rank() == 0 ? Shape{4, 2} : Shape{3};
    EXPECT_EQ(f(ones(sizes), ones(sizes)).item<float>(), ranks.rank() == 0 ? 16 : 6);
    expect_compiles(ranks, f, 1);
    // Every dimension is a symbol on both.
    const Shape other = ranks.rank() == 0 ? Shape{5, 3} : Shape{7};
    EXPECT_EQ(f(ones(other), ones(other)).item<float>(), ranks.rank() == 0 ? 30 : 14);
    expect_compiles(ranks, f, 1);
  });
}

// spec: test_compiler_collectives_missing_source
TEST(SharedSizes, RanksMayReadOtherArguments) {
  run_ranks(3, [&](const comm::Group& ranks) {
    auto f = compile([](int64_t r, const std::vector<Tensor>& xs) { return sum(xs[static_cast<size_t>(r)]); },
                     {.agree_on_sizes = &ranks});
    const std::vector<Tensor> xs(static_cast<size_t>(ranks.size()), ones({10}));
    EXPECT_EQ(f(int64_t{ranks.rank()}, xs).item<float>(), 10);
    expect_compiles(ranks, f, 1);
  });
}

// spec: test_compiler_collectives_scalar_missing_source
TEST(SharedSizes, RanksMayHaveOtherNumbersOfArguments) {
  run_ranks(3, [&](const comm::Group& ranks) {
    auto f = compile([](int64_t r, const std::vector<int64_t>& xs) { return full({}, xs[static_cast<size_t>(r)]); },
                     {.agree_on_sizes = &ranks});
    std::vector<int64_t> xs;
    for (int i = 0; i <= ranks.rank(); ++i) xs.push_back(10 + i);
    EXPECT_EQ(f(int64_t{ranks.rank()}, xs).item<float>(), static_cast<float>(10 + ranks.rank()));
    expect_compiles(ranks, f, 1);
  });
}

// spec: test_compiler_collectives_type_mismatch
TEST(SharedSizes, RanksMayHaveATensorAndANumber) {
  run_ranks(2, [&](const comm::Group& ranks) {
    using Value = std::variant<Tensor, int64_t>;
    auto f = compile(
        [](const Value& x) {
          return std::holds_alternative<Tensor>(x) ? sum(std::get<Tensor>(x)) : full({}, std::get<int64_t>(x));
        },
        {.agree_on_sizes = &ranks});
    const float made = f(ranks.rank() == 0 ? Value(ones({10})) : Value(int64_t{12})).item<float>();
    EXPECT_EQ(made, ranks.rank() == 0 ? 10 : 12);
    expect_compiles(ranks, f, 1);
  });
}

// A dimension is no size: ranks that sum over different ones do not agree.
TEST(SharedSizes, GraphsAreComparedWithTheirDimensions) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f =
        compile([&](const Tensor& x) { return sum(x, ranks.rank()); }, {.agree = &ranks, .agree_on_sizes = &ranks});
    EXPECT_THROW(f(ones({3, 3})), StateError);
  });
}

// Graphs of other sizes agree; those of other nodes do not.
TEST(SharedSizes, GraphsAreComparedWithoutSizes) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f = compile([](const Tensor& x) { return sum(relu(x)); }, {.agree = &ranks, .agree_on_sizes = &ranks});
    EXPECT_EQ(f(ones({3 + ranks.rank()})).item<float>(), static_cast<float>(3 + ranks.rank()));
    auto g = compile([&](const Tensor& x) { return ranks.rank() == 0 ? relu(x) : neg(x); },
                     {.agree = &ranks, .agree_on_sizes = &ranks});
    EXPECT_THROW(g(ones({3 + ranks.rank()})), StateError);
  });
}

// What differs stays a symbol, whatever comes later.
TEST(SharedSizes, OnceDifferentIsDifferentForEver) {
  compiled::SeenSizes seen;
  const auto is_marked = [&](const std::string& name, int64_t dim) {
    std::vector<compiled::SizeSource> sources{{.name = name, .value = 5, .argument = 0, .dim = dim}};
    seen.mark(sources);
    return sources[0].mark != compiled::Mark::kNone;
  };
  seen.merge("arg 0\ttensor 5 10\narg 1\tnumber 3\n");
  EXPECT_FALSE(is_marked("arg 0.size(0)", 0) || is_marked("arg 1", 0));
  seen.merge("arg 0\ttensor 6 10\narg 1\tnumber 3\n");
  seen.merge("arg 0\ttensor 5 10\n");
  EXPECT_TRUE(is_marked("arg 0.size(0)", 0));
  EXPECT_FALSE(is_marked("arg 0.size(1)", 1) || is_marked("arg 1", 0) || is_marked("input 2.size(0)", 0));
  seen.merge("arg 0\ttensor 6\narg 1\tnumber 4\n");
  EXPECT_TRUE(is_marked("arg 0.size(1)", 1) && is_marked("arg 1", 0));
}

// What any rank has seen counts, not that of a neighbour alone, and what was seen before is not forgotten. Ranks meet
// once for each compilation, whatever it traces.
TEST(SharedSizes, OneRankAmongManyIsEnough) {
  for (const bool whole : {false, true}) {
    run_ranks(4, [&](const comm::Group& ranks) {
      const comm::CommCounter counter;
      auto f = compile([](const Tensor& x) { return mul(x, 2); }, {.whole_graph = whole, .agree_on_sizes = &ranks});
      const bool is_odd_one = ranks.rank() == 2;
      const auto call = [&](int64_t n, int64_t m) {
        EXPECT_EQ(f(ones({n, m})).to_vector<float>(), std::vector<float>(static_cast<size_t>(n * m), 2));
      };
      call(is_odd_one ? 5 : 4, 6);
      expect_compiles(ranks, f, 1);
      const int64_t of_one = counter.total();
      call(is_odd_one ? 7 : 9, 6);  // a symbol on all of them
      EXPECT_EQ(explain(f).compiles, 1);
      call(9, is_odd_one ? 6 : 3);  // rank 2 goes on, and compiles with the others in its next call
      if (is_odd_one) call(9, 8);
      expect_compiles(ranks, f, 2);
      EXPECT_EQ(counter.total(), 2 * of_one) << "ranks met more than once for a compilation";
      for (const int64_t n : {11, 3}) call(n, n + 2);
      EXPECT_EQ(explain(f).compiles, 2);
    });
  }
}

// Which values a rank keeps for its backward follows from its sizes. Ranks may choose differently: a collective is
// never computed again, so that all ranks run the same ones, and they agree on what was traced.
TEST(SharedSizes, RanksMayKeepOtherValues) {
  run_ranks(2, [&](const comm::Group& ranks) {
    const comm::Group compiling = ranks.duplicate();
    const Tensor group = group_tensor(ranks), w = set_requires_grad(mul(ones({64, 64}), 0.01));
    const auto body = [&](const Tensor& x) {
      const Tensor h = gelu(matmul(gelu(matmul(x, w)), w));
      return mul(all_reduce(sum(h, {0}), group), 2);
    };
    std::vector<size_t> results;
    const compiled::Backend watching = [&](graph::Graph graph, const compiled::GraphInfo& info) {
      if (!info.is_backward) results.push_back(graph.outputs.size());
      return compiled::joint_eager()(std::move(graph), info);
    };
    auto f = compile(body, {.backend = watching, .agree = &compiling, .agree_on_sizes = &compiling});
    const Tensor x = ones({ranks.rank() == 0 ? 512 : 8, 64});
    std::vector<std::vector<float>> gradients;
    for (const bool is_compiled : {false, true}) {
      set_gradient(w, {});
      backward(sum(is_compiled ? f(x) : body(x)));
      gradients.push_back(gradient(w).to_vector<float>());
    }
    EXPECT_EQ(gradients[0], gradients[1]);
    ASSERT_EQ(results.size(), 1u);
    const std::vector<std::string> kept = compiled::gather_texts(compiling, std::to_string(results[0]));
    EXPECT_NE(kept[0], kept[1]) << "both ranks keep as much, so that this proves nothing";
  });
}

}  // namespace
}  // namespace chorale
