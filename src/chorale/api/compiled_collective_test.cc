// Collectives inside of compiled graphs: on one rank, and on several.
#include <gtest/gtest.h>

#include <tuple>
#include <type_traits>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/collective.h"

namespace chorale {
namespace {

using comm::run_ranks;

Tensor numbers(const Shape& sizes, int seed) {
  std::vector<float> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(static_cast<int>(i * 7 + 3) % 11 - 5 + seed);
  return Tensor::from(values, sizes);
}

// Forms that write into a tensor of the caller's return nothing, and the graph knows what they wrote.
static_assert(std::is_void_v<decltype(all_reduce_(Tensor(), Tensor()))>);
static_assert(std::is_void_v<decltype(all_gather_into(Tensor(), Tensor(), Tensor()))>);
static_assert(std::is_void_v<decltype(all_gather_into(std::vector<Tensor>(), Tensor(), Tensor()))>);
static_assert(std::is_void_v<decltype(reduce_scatter_into(Tensor(), Tensor(), Tensor()))>);
static_assert(std::is_void_v<decltype(all_to_all_into(Tensor(), Tensor(), Tensor()))>);

// In a group of one rank, what goes into a collective comes out; here times w.
template <class F>
void expect_times_w(const F& collective, const Shape& sizes = {4, 4}) {
  run_ranks(1, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks), w = numbers(sizes, 2);
    auto f = compile(
        [&](const Tensor& x) {
          Tensor out = empty(x.sizes());
          collective(out, x, group);
          return mul(out, w);
        },
        {.whole_graph = true});
    for (int call = 0; call < 2; ++call) {
      const Tensor x = numbers(sizes, call);
      const Tensor made = f(x);
      EXPECT_EQ(made.to_vector<float>(), mul(numbers(sizes, call), w).to_vector<float>());
    }
    EXPECT_EQ(explain(f).compiles, 1);
  });
}

// spec: test_compiled_all_reduce_returns_none
TEST(CompiledCollectives, AllReduceInPlaceReturnsNothing) {
  run_ranks(1, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks), w = numbers({4, 4}, 2);
    auto f = compile(
        [&](const Tensor& x) {
          all_reduce_(x, group);
          return mul(x, w);
        },
        {.whole_graph = true});
    const Tensor x = numbers({4, 4}, 1);
    EXPECT_EQ(f(x).to_vector<float>(), mul(numbers({4, 4}, 1), w).to_vector<float>());
  });
}

// spec: test_compiled_all_gather_into_tensor_returns_none
TEST(CompiledCollectives, AllGatherIntoATensorReturnsNothing) {
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) { all_gather_into(out, x, group); });
}
// spec: test_compiled_reduce_scatter_tensor_returns_none
TEST(CompiledCollectives, ReduceScatterIntoATensorReturnsNothing) {
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) { reduce_scatter_into(out, x, group); });
}
// spec: test_compiled_all_to_all_single_returns_none
TEST(CompiledCollectives, AllToAllIntoATensorReturnsNothing) {
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) { all_to_all_into(out, x, group); });
}
// spec: test_compiled_all_gather_returns_none
TEST(CompiledCollectives, AllGatherIntoAListReturnsNothing) {
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) {
    all_gather_into(std::vector<Tensor>{out}, x, group);
  });
}

// One function has both of its names: into a tensor of the caller's.
// spec: test_compiled_reduce_scatter_base_returns_none
TEST(CompiledCollectives, ReduceScatterIntoAPartReturnsNothing) {
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) { reduce_scatter_into(out, x, group); });
  expect_times_w([](const Tensor& out, const Tensor& x, const Tensor& group) { reduce_scatter_into(out, x, group); },
                 {4});
}
// spec: test_compiled_all_gather_base_returns_none
TEST(CompiledCollectives, AllGatherIntoOneDimensionReturnsNothing) {
  const auto gather = [](const Tensor& out, const Tensor& x, const Tensor& group) { all_gather_into(out, x, group); };
  expect_times_w(gather);
  expect_times_w(gather, {4});
  run_ranks(1, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks);
    auto f = compile(
        [&](const Tensor& x) {
          const Tensor out = empty({4});
          all_gather_into(out, x, group);
          return sum(out);
        },
        {.whole_graph = true});
    EXPECT_EQ(f(ones({4})).item<float>(), 4);
  });
}

// What a whole graph says of a call that has no form which can be traced. No rank gets as far as to talk to another.
template <class F>
void expect_untraceable(const char* name, const char* instead, const F& call, const Shape& sizes = {4}) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f = compile(
        [&](const Tensor& x) {
          call(ranks, x);
          return mul(x, 2);
        },
        {.whole_graph = true});
    try {
      f(numbers(sizes, 1));
      ADD_FAILURE() << name << " was traced";
    } catch (const StateError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(concat("Group::", name, " cannot be part of a graph")), std::string::npos) << text;
      EXPECT_EQ(text.find("use the op") != std::string::npos, instead != nullptr) << text;
      if (instead) {
        EXPECT_NE(text.find(concat("chorale::", instead, " of")), std::string::npos) << text;
      }
    }
    EXPECT_EQ(explain(f).compiles, 0);
    ranks.barrier().wait();  // the group is whole, and nobody is behind
  });
}
using comm::Group;

// spec: test_nn_functional_all_reduce_unsupported
TEST(UntraceableCollectives, AllReduceNamesTheOp) {
  expect_untraceable("all_reduce", "all_reduce",
                     [](const Group& group, const Tensor& x) { std::ignore = group.all_reduce(x); }, {4, 4});
}
// spec: test_nn_functional_all_gather_unsupported
TEST(UntraceableCollectives, AllGatherNamesTheOp) {
  expect_untraceable("all_gather", "all_gather",
                     [](const Group& group, const Tensor& x) {
                       std::ignore = group.all_gather({empty({4, 4}), empty({4, 4})}, x);
                     },
                     {4, 4});
}
// spec: test_nn_functional_reduce_scatter_unsupported
TEST(UntraceableCollectives, ReduceScatterNamesTheOp) {
  expect_untraceable("reduce_scatter", "reduce_scatter",
                     [](const Group& group, const Tensor& x) {
                       std::ignore = group.reduce_scatter(empty({4, 4}), {x, x});
                     },
                     {4, 4});
}
// spec: test_nn_functional_all_to_all_single_unsupported
TEST(UntraceableCollectives, AllToAllOfOneTensorNamesTheOp) {
  expect_untraceable("all_to_all", "all_to_all",
                     [](const Group& group, const Tensor& x) {
                       std::ignore = group.all_to_all_single(empty({4, 4}), x);
                     },
                     {4, 4});
}
// spec: test_nn_functional_broadcast_unsupported
TEST(UntraceableCollectives, BroadcastNamesTheOp) {
  expect_untraceable("broadcast", "broadcast",
                     [](const Group& group, const Tensor& x) { std::ignore = group.broadcast(x, 0); });
}
// spec: test_nn_functional_reduce_unsupported
TEST(UntraceableCollectives, ReduceNamesTheOp) {
  expect_untraceable("reduce", "reduce", [](const Group& group, const Tensor& x) { std::ignore = group.reduce(x, 0); });
}
// spec: test_nn_functional_gather_unsupported
TEST(UntraceableCollectives, GatherHasNoOp) {
  expect_untraceable("gather", nullptr, [](const Group& group, const Tensor& x) {
    std::ignore =
        group.gather(group.rank() == 0 ? std::vector<Tensor>{empty({4}), empty({4})} : std::vector<Tensor>{}, x, 0);
  });
}
// spec: test_nn_functional_scatter_unsupported
TEST(UntraceableCollectives, ScatterHasNoOp) {
  expect_untraceable("scatter", nullptr, [](const Group& group, const Tensor& x) {
    std::ignore = group.scatter(x, group.rank() == 0 ? std::vector<Tensor>{x, x} : std::vector<Tensor>{}, 0);
  });
}
// spec: test_nn_functional_all_to_all_unsupported
TEST(UntraceableCollectives, AllToAllOfListsNamesTheOp) {
  expect_untraceable("all_to_all", "all_to_all", [](const Group& group, const Tensor& x) {
    std::ignore = group.all_to_all({empty({4}), empty({4})}, {x, x});
  });
}
// spec: test_nn_functional_all_gather_base_unsupported
TEST(UntraceableCollectives, AllGatherIntoATensorNamesTheOp) {
  expect_untraceable("all_gather", "all_gather",
                     [](const Group& group, const Tensor& x) { std::ignore = group.all_gather_into(empty({8}), x); });
}

// Segments end there, say so, and the call gets its values.
TEST(UntraceableCollectives, EndASegmentAndSayWhy) {
  run_ranks(2, [&](const comm::Group& ranks) {
    auto f = compile([&](const Tensor& x) {
      const Tensor y = add(x, 1);
      ranks.all_reduce(y).wait();
      return mul(y, 2);
    });
    const Tensor x = numbers({4}, ranks.rank());
    const Tensor expected = mul(add(add(numbers({4}, 0), 1), add(numbers({4}, 1), 1)), 2);
    EXPECT_EQ(f(x).to_vector<float>(), expected.to_vector<float>());
    ASSERT_EQ(explain(f).breaks.size(), 1u);
    EXPECT_NE(explain(f).breaks[0].find("Group::all_reduce"), std::string::npos) << explain(f).breaks[0];
  });
}

// Forward, gradient and a wait in the middle, on two and three ranks, in both contracts.
TEST(CompiledCollectives, AreNodesOfTheGraph) {
  for (const int size : {2, 3}) {
    run_ranks(size, [&](const comm::Group& ranks) {
      const Tensor group = group_tensor(ranks);
      const auto body = [&](const Tensor& x) {
        const Tensor begun = start_all_reduce(mul(x, 2), group);
        const Tensor meanwhile = relu(x);
        const Tensor gathered = all_gather(x, group, 0);
        const Tensor sums = reduce_scatter(gathered, group, 0);
        return add(add(mul(wait_for(begun), meanwhile), sums), all_reduce(square(x), group, Reduce::kAverage));
      };
      const auto gradient_of_sum = [&](const auto& f, const Tensor& x) {
        backward(sum(f(x)));
        return gradient(x).to_vector<float>();
      };
      const Tensor eager_in = set_requires_grad(numbers({3, 5}, ranks.rank()));
      const std::vector<float> expected = body(eager_in).to_vector<float>();
      const std::vector<float> gradients = gradient_of_sum(body, eager_in);
      for (const bool whole : {true, false}) {
        auto f = compile(body, {.whole_graph = whole});
        for (int call = 0; call < 3; ++call) {
          const Tensor x = set_requires_grad(numbers({3, 5}, ranks.rank()));
          EXPECT_EQ(f(x).to_vector<float>(), expected) << whole;
          EXPECT_EQ(gradient_of_sum(f, x), gradients) << whole;
        }
        EXPECT_EQ(explain(f).compiles, 1) << whole;
        EXPECT_TRUE(explain(f).breaks.empty()) << whole;
        const std::string text = explain(f).graphs.at(0).text;
        EXPECT_NE(text.find("collective_start"), std::string::npos);
        EXPECT_NE(text.find("collective_wait"), std::string::npos);
        EXPECT_EQ(graph::print(graph::parse(text)), text);
      }
    });
  }
}

// A collective whose result only some ranks read is no dead code.
TEST(CompiledCollectives, RunWhereNobodyReadsTheResult) {
  run_ranks(2, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks);
    auto f = compile(
        [&](const Tensor& x) {
          const Tensor all = all_reduce(x, group);
          return ranks.rank() == 0 ? add(all, 1) : neg(x);
        },
        {.whole_graph = true});
    for (int call = 0; call < 3; ++call) {
      const Tensor x = numbers({4}, call), other = numbers({4}, call);
      EXPECT_EQ(f(x).to_vector<float>(), (ranks.rank() == 0 ? add(add(x, other), 1) : neg(x)).to_vector<float>());
    }
  });
}

// In-place forms on several ranks.
TEST(CompiledCollectives, WriteIntoTensorsOfTheCaller) {
  run_ranks(2, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks);
    const auto body = [&](const Tensor& x) {
      const Tensor gathered = empty({4, 3}), scattered = empty({1, 3}), exchanged = empty({2, 3});
      all_gather_into(gathered, x, group);
      reduce_scatter_into(scattered, x, group);
      all_to_all_into(exchanged, x, group);
      all_reduce_(x, group);
      return std::vector<Tensor>{gathered, scattered, exchanged, mul(x, 2)};
    };
    const Tensor mine = numbers({2, 3}, 10 * ranks.rank()), theirs = numbers({2, 3}, 10 * (1 - ranks.rank()));
    const Tensor first = ranks.rank() == 0 ? mine : theirs, second = ranks.rank() == 0 ? theirs : mine;
    const int64_t own = ranks.rank();
    const std::vector<Tensor> expected{cat({first, second}, 0), narrow(add(first, second), 0, own, 1),
                                       cat({narrow(first, 0, own, 1), narrow(second, 0, own, 1)}, 0),
                                       mul(add(first, second), 2)};
    auto f = compile(body, {.whole_graph = true});
    for (int call = 0; call < 2; ++call) {
      const Tensor x = clone(mine);
      const std::vector<Tensor> made = f(x);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(made[i].to_vector<float>(), contiguous(expected[i]).to_vector<float>()) << i;
      }
      EXPECT_EQ(x.to_vector<float>(), add(first, second).to_vector<float>());
    }
  });
}

// An argument may be on its way still: the function waits for it, and another size is no other graph.
// spec: test_async_subclass_no_specialize
TEST(CompiledCollectives, APendingArgumentIsATensorOfAnySize) {
  run_ranks(2, [](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks);
    auto f = compile([](const Tensor& x) { return add(x, 1); }, {.whole_graph = true, .dynamic = Dynamic::kAlways});
    for (const int64_t n : {10, 12}) {
      const Tensor pending = start_all_reduce(full({n}, 2), group);
      EXPECT_TRUE(is_pending(pending));
      EXPECT_EQ(f(pending).to_vector<float>(), std::vector<float>(static_cast<size_t>(n), 5)) << n;
    }
    EXPECT_EQ(explain(f).compiles, 1);
    EXPECT_EQ(explain(f).resizes, 1);
  });
}

}  // namespace
}  // namespace chorale
