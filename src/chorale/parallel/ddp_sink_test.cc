// Gradients that go elsewhere than to the parameters: to a map, as they do in a context of distributed autograd.
#include <future>

#include "chorale/autograd/grad_sink.h"
#include "chorale/base/error.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using autograd::GradientMap;

// What a rank feeds in a pass; the parameters that it uses may depend on both.
Tensor input_of(int rank, int pass) { return pattern({3, 10}, 100 * pass + rank); }

// The average over ranks, computed by one of them with a module of its own: no collective takes part.
template <class M, class Loss>
std::vector<Tensor> averages(const M& module, int size, int pass, const Loss& loss) {
  std::vector<Tensor> sums(module.parameters().size());
  for (int rank = 0; rank < size; ++rank) {
    M own = nn::clone(module);
    own.zero_grad(true);
    backward(loss(own, rank, pass));
    const auto parameters = own.parameters();
    for (size_t i = 0; i < sums.size(); ++i) {
      if (const Tensor g = gradient(parameters[i]); g.defined()) sums[i] = sums[i].defined() ? add(sums[i], g) : g;
    }
  }
  for (Tensor& sum : sums) {
    if (sum.defined()) sum = div(sum, size);
  }
  return sums;
}

struct MiddleUnused : nn::Module {
  Linear a{10, 6}, never{4, 4}, sometimes{6, 6, {.bias = false}}, b{6, 2};
  CHORALE_MODULE(MiddleUnused, a, never, sometimes, b)
  Tensor forward(const Tensor& x, bool with) {
    const Tensor y = tanh(a(x));
    return b(with ? sometimes(y) : y);
  }
};
// Pass 1: all ranks use `sometimes`; pass 2: rank 1 alone; pass 3: nobody.
bool uses(int rank, int pass) { return pass % 3 == 1 || (pass % 3 == 2 && rank == 1); }
const auto loss_of = [](auto& module, int rank, int pass) {
  return sum(square(module(input_of(rank, pass), uses(rank, pass))));
};

class Sinks : public testing::TestWithParam<std::tuple<int, bool, FindUnused>> {};
INSTANTIATE_TEST_SUITE_P(Ddp, Sinks,
                         testing::Combine(testing::Values(2, 3), testing::Bool(),
                                          testing::Values(FindUnused::kAuto, FindUnused::kOn)));

TEST_P(Sinks, GetTheAveragesAndTheParametersOwnGradientsStay) {
  const auto [size, views, search] = GetParam();
  run_ranks(size, [views = views, search = search](comm::Group& group) {
    DistributedDataParallel ddp(
        seeded(MiddleUnused(), 1), group,
        {.find_unused_parameters = search, .gradient_as_bucket_view = views, .bucket_cap_mb = 1e-4});
    const MiddleUnused& module = ddp.module();
    const auto parameters = module.named_parameters();
    const auto expect = [&](int pass, const auto& gradient_of) {
      const auto expected = averages(module, group.size(), pass, loss_of);
      for (size_t i = 0; i < parameters.size(); ++i) {
        expect_close(gradient_of(parameters[i].second), expected[i], concat(parameters[i].first, " in pass ", pass));
      }
    };
    backward(loss_of(ddp, group.rank(), 1));
    expect(1, [](const Tensor& p) { return gradient(p); });
    std::vector<Tensor> before;
    before.reserve(parameters.size());
    for (const auto& [name, p] : parameters) before.push_back(gradient(p).defined() ? clone(gradient(p)) : Tensor{});

    // Several maps at once; each keeps what it got.
    std::vector<std::unique_ptr<GradientMap>> maps;
    for (int pass = 1; pass <= 5; ++pass) {
      maps.push_back(std::make_unique<GradientMap>());
      backward(loss_of(ddp, group.rank(), pass), {}, {.sink = maps.back().get()});
    }
    for (int pass = 1; pass <= 5; ++pass) {
      GradientMap& map = *maps[static_cast<size_t>(pass) - 1];
      expect(pass, [&](const Tensor& p) { return map.gradient(p); });
      for (const auto& [name, p] : parameters) {
        if (map.gradient(p).defined()) expect_same_on_all_ranks(group, map.gradient(p), name);
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor own = gradient(parameters[i].second);
      ASSERT_EQ(own.defined(), before[i].defined()) << parameters[i].first;
      if (!own.defined()) continue;
      EXPECT_TRUE(equal_bits(own, before[i])) << parameters[i].first;
    }

    // And back: the parameters' own gradients go on from where they were.
    backward(loss_of(ddp, group.rank(), 1));
    const auto once = averages(module, group.size(), 1, loss_of);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!once[i].defined()) continue;
      expect_close(gradient(parameters[i].second), mul(once[i], 2), parameters[i].first);
    }
    GradientMap& first = *maps[0];
    expect(1, [&](const Tensor& p) { return first.gradient(p); });
  });
}

TEST(DdpSinks, GradientsOfSeveralPassesAddUpInOneMap) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(MiddleUnused(), 1), group);
    const auto one = averages(ddp.module(), 2, 1, loss_of), four = averages(ddp.module(), 2, 4, loss_of);
    GradientMap map;
    {
      const auto scope = ddp.no_sync();
      backward(loss_of(ddp, group.rank(), 1), {}, {.sink = &map});
    }
    backward(loss_of(ddp, group.rank(), 4), {}, {.sink = &map});
    const auto parameters = ddp.module().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (one[i].defined()) expect_close(map.gradient(parameters[i]), add(one[i], four[i]));
      EXPECT_FALSE(gradient(parameters[i]).defined());
    }
  });
}

TEST(DdpSinks, AStaticGraphIsReducedIntoTheMapToo) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(MiddleUnused(), 1), group, {.static_graph = true, .bucket_cap_mb = 1e-4});
    for (int pass = 1; pass <= 10; pass += 3) {
      const auto expected = averages(ddp.module(), 2, pass, loss_of);
      GradientMap map;
      backward(loss_of(ddp, group.rank(), pass), {}, {.sink = &map});
      const auto parameters = ddp.module().parameters();
      for (size_t i = 0; i < parameters.size(); ++i) expect_close(map.gradient(parameters[i]), expected[i]);
    }
  });
}

TEST(DdpSinks, HooksThatConsumeGradientsSeeAveragesInTheMap) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(MiddleUnused(), 1), group);
    const Tensor weight = ddp.module().a.weight;
    const auto expected = averages(ddp.module(), 2, 1, loss_of);
    GradientMap map;
    int seen = 0;
    after_complete(weight, [&](const Tensor& leaf, autograd::GradSink& sink) {
      EXPECT_EQ(&sink, &map);
      expect_close(sink.gradient(leaf), expected[0]);
      ++seen;
    });
    backward(loss_of(ddp, group.rank(), 1), {}, {.sink = &map});
    EXPECT_EQ(seen, 1);
  });
}

TEST(DdpSinks, TablesWithSparseGradientsAreAveragedIntoTheMap) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(nn::Embedding(6, 2, {.sparse = true}), 1), group);
    GradientMap map;
    const Tensor ids = Tensor::from<int64_t>({group.rank(), 3, 3}, {3});
    backward(sum(ddp(ids)), {}, {.sink = &map});
    const Tensor weight = ddp.module().weight;
    ASSERT_TRUE(map.gradient(weight).is_sparse());
    EXPECT_EQ(to_dense(map.gradient(weight)).to_vector<float>(),
              (std::vector<float>{.5, .5, .5, .5, 0, 0, 2, 2, 0, 0, 0, 0}));
    EXPECT_FALSE(gradient(weight).defined());
  });
}

// The output of a rank's module went to another rank; its gradient comes back in another thread, long after the run of
// this rank has begun.
TEST(DdpSinks, ARunThatWaitsForItsRootEndsWithTheAverages) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(MiddleUnused(), 1), group);
    const Tensor x = input_of(group.rank(), 1);
    const Tensor y = ddp(x, true);
    const auto expected = averages(ddp.module(), 3, 1, [](auto& module, int rank, int pass) {
      return sum(mul(module(input_of(rank, pass), true), rank + 1));
    });
    GradientMap map;
    autograd::BackwardRun run({.sink = &map});
    autograd::LateRoot late = run.expect_root(autograd::edge_of(y));
    const auto remote = std::async(
        std::launch::async, [&, rank = group.rank()] { late.deliver({full(y.sizes(), rank + 1, DType::kF32)}); });
    run.run();
    const auto parameters = ddp.module().named_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      expect_close(map.gradient(parameters[i].second), expected[i], parameters[i].first);
      EXPECT_FALSE(gradient(parameters[i].second).defined());
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
