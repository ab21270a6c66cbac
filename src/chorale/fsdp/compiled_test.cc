// Compiled functions around fully sharded modules: rows of spec/compiled-training.md, A10. What is sent around a module
// is no part of a graph, so each one that is sharded by itself has graphs of its own.
#include <gmock/gmock.h>

#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/nn/init.h"

namespace chorale::fsdp {
namespace {

using compiled::GraphInfo;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

// Linear and ReLU, four times. Weights: Xavier's; biases 0.01.
struct CompiledToy : nn::Module {
  nn::Linear a, b, c, d;
  CHORALE_MODULE(CompiledToy, a, b, c, d)
  CompiledToy(int64_t in, int64_t hidden, int64_t out)
      : a(in, hidden), b(hidden, hidden), c(hidden, hidden), d(hidden, out) {
    const NoGrad quiet;
    for (nn::Linear* linear : {&a, &b, &c, &d}) {
      nn::init::xavier_uniform_(linear->weight);
      fill_(linear->bias, 0.01);
    }
  }
  Tensor forward(const Tensor& x) { return relu(d(relu(c(relu(b(relu(a(x)))))))); }
};

void expect_near(const Tensor& a, const Tensor& b, double relative, double absolute, const std::string& what = "") {
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_LE(std::abs(x[i] - y[i]), absolute + relative * std::abs(y[i])) << what << " " << i;
}
void expect_p4(const Tensor& a, const Tensor& b, const std::string& what = "") { expect_near(a, b, 1e-4, 1e-4, what); }
void expect_pd(const Tensor& a, const Tensor& b) { expect_near(a, b, 1.3e-6, 1e-5); }

// The forward graphs that a backend was given: how many, and of the last the text and the number of inputs.
struct SeenGraphs {
  int count = 0;
  size_t inputs = 0;
  std::string text{};
};
compiled::Backend watching(SeenGraphs& seen) {
  return [&seen, run = compiled::joint_eager()](graph::Graph graph, const GraphInfo& info) {
    graph::verify(graph);
    if (!info.is_backward) seen = {seen.count + 1, graph.inputs.size(), graph::print(graph)};
    return run(std::move(graph), info);
  };
}

// spec: test_fsdp_aot_eager
TEST(CompiledFullySharded, ComputesWhatEagerDoesWithAGraphForEachModule) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2}, {"shard"});
    manual_seed(3);
    CompiledToy toy(10, 64, 5);
    const Tensor x = pattern({20, 10}, 1);
    set_requires_grad(x);
    const Tensor expected = toy(x);
    backward(sum(expected));
    const Tensor dx = gradient(x);
    for (const bool each : {false, true}) {
      CompiledToy model = nn::clone(toy);
      if (each) {
        for (nn::Linear* linear : {&model.a, &model.b, &model.c, &model.d}) fully_shard(*linear, {.mesh = mesh});
      }
      fully_shard(model, {.mesh = mesh});
      SeenGraphs seen;
      auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
      set_gradient(x, {});
      const Tensor y = f(x);
      expect_p4(y, expected);
      // Each linear layer, and what the root does behind it; equal stretches share a graph.
      EXPECT_EQ(explain(f).runs, each ? 8 : 1);
      EXPECT_GE(seen.count, each ? 5 : 1);
      EXPECT_THAT(explain(f).break_reasons(), Each(HasSubstr("of a fully sharded module")));
      backward(sum(y));
      expect_p4(gradient(x), dx, "gradient of the input");
      NamedTensors own = model.named_parameters(), whole = toy.named_parameters();
      for (size_t i = 0; i < own.size(); ++i) {
        const Tensor average = full_tensor(gradient(own[i].second));  // of equal gradients
        expect_p4(average, gradient(whole[i].second), own[i].first);
      }
      expect_p4(f(x), expected, "once more");
    }
  });
}

struct WithState : nn::Module {
  CompiledToy net{10, 64, 5};
  CHORALE_MODULE(WithState, net)
  int state = 0;
  Tensor forward(const Tensor& x) {
    state = 2;
    return net(x) * state;
  }
};

// Upstream's one break is named for what its wrapper sets, requires_grad of the parameters that it has gathered.
// spec: test_fsdp_setattr
TEST(CompiledFullySharded, HostValuesAreWrittenInEveryCallAndTheWrapperIsTheOnlyBreak) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    WithState model;
    const Tensor x = pattern({20, 10}, 1), expected = model(x);
    fully_shard(model, {.mesh = Mesh(group, {2}, {"shard"})});
    auto f = compile([&](const Tensor& in) { return model(in); });
    for (int call = 0; call < 3; ++call) {
      model.state = 0;
      expect_p4(f(x), expected);
      EXPECT_EQ(model.state, 2);
    }
    const std::vector<std::string> breaks = explain(f).breaks;
    ASSERT_EQ(breaks.size(), 3u) << "one in each call";
    EXPECT_THAT(breaks, Each(breaks[0]));
    EXPECT_THAT(breaks[0], HasSubstr("requires_grad"));
    EXPECT_EQ(explain(f).compiles, 1);
  });
}

// spec: test_fsdp_orig_params_assert
TEST(CompiledFullySharded, WhatNoWholeGraphCanContainIsRefusedWhenItRunsAndNotWhenItIsAskedFor) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    CompiledToy model(10, 64, 5);
    const Tensor x = pattern({20, 10}, 1), expected = model(x);
    fully_shard(model, {.mesh = Mesh(group, {2}, {"shard"})});
    const CommCounter counter;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.whole_graph = true});
    try {
      f(x);
      ADD_FAILURE() << "parameters cannot be gathered inside of a whole graph";
    } catch (const StateError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the beginning of the forward of a fully sharded module"));
      EXPECT_THAT(error.what(), HasSubstr("compile without whole_graph"));
    }
    EXPECT_EQ(counter.total(), 0) << "it is refused before anything is sent";
    expect_p4(model(x), expected, "uncompiled");
    auto segmented = compile([&](const Tensor& in) { return model(in); });
    expect_p4(segmented(x), expected, "with breaks");
  });
}

// Only the kind of a sharded parameter is compared; anything else about it changes only when the module is sharded
// anew.
// spec: test_fsdp_skip_guards
TEST(CompiledFullySharded, GuardsSayWhereTheyComeFromAndLeaveShardedParametersAlone) {
  run_ranks(2, [](comm::Group& group) {
    for (const bool guarded : {false, true}) {
      manual_seed(3);
      CompiledToy model(10, 64, 5);
      const Tensor x = pattern({20, 10}, 1), expected = model(x);
      fully_shard(model, {.mesh = Mesh(group, {2}, {"shard"})});
      auto f = compile([&](const Tensor& in) { return model(in); }, {.guard_managed = guarded});
      const NoGrad quiet;
      expect_p4(f(x), expected);
      const std::vector<std::string> guards = explain(f).guards;
      EXPECT_THAT(guards, Contains("local arg 0 is f32[20, 10]"));
      if (guarded) {
        EXPECT_THAT(guards, Contains("captured f32[64, 10] and requires a gradient"));
        EXPECT_THAT(guards, Each(Not(HasSubstr("fully sharded"))));
      } else {
        EXPECT_THAT(guards, Contains("fully sharded a.weight is f32[64, 10]"));
        EXPECT_THAT(guards, Contains("fully sharded d.bias is f32[5]"));
        EXPECT_THAT(guards, Each(Not(HasSubstr("captured"))));
      }
      set_requires_grad(model.b.bias, false);  // whether the whole one wants a gradient is no guard
      expect_p4(f(x), expected, "frozen");
      EXPECT_EQ(explain(f).compiles, guarded ? 2 : 1);
      EXPECT_EQ(explain(f).recompiles.size(), guarded ? 1u : 0u);
    }
  });
}

// A layer that the module knows nothing of, and a number that changes.
struct WithHidden : nn::Module {
  nn::Linear seen{1, 1};
  CHORALE_MODULE(WithHidden, seen)
  std::shared_ptr<nn::Linear> hidden = std::make_shared<nn::Linear>(1, 1);
  int calls = 0;
  Tensor forward(const Tensor& x) {
    ++calls;
    return (*hidden)(seen(x));
  }
};

// spec: test_fsdp_unspecialized_forced_getattr_no_inline, test_fsdp_unspecialized_forced_getattr_inline
TEST(CompiledFullySharded, ATensorThatIsNoParameterIsAnOrdinaryInput) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(4);
    WithHidden model;
    const Tensor x = pattern({1, 1}, 2), expected = model(x);
    fully_shard(model, {.mesh = Mesh(group, {2}, {"shard"})});
    EXPECT_FALSE(model.hidden->weight.is_sharded());
    SeenGraphs seen;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
    expect_p4(f(x), expected);
    EXPECT_EQ(seen.count, 1);
    EXPECT_EQ(seen.inputs, 5u) << seen.text;
    EXPECT_EQ(model.calls, 2);
  });
}

struct TwoWide : nn::Module {
  nn::Linear a{10, 5000}, b{5000, 5000};
  CHORALE_MODULE(TwoWide, a, b)
  Tensor forward(const Tensor& x) { return relu(b(relu(a(x)))); }
};

// spec: test_fsdp_skip_register_attr_or_module
TEST(CompiledFullySharded, ParametersAreInputsOfTheGraph) {
  run_ranks(1, [](comm::Group& group) {
    TwoWide model;
    const Tensor x = uniform({20, 10}), expected = model(x);
    fully_shard(model, {.mesh = Mesh(group, {1}, {"shard"})});
    SeenGraphs seen;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
    expect_p4(f(x), expected);
    EXPECT_EQ(seen.count, 1);
    EXPECT_EQ(seen.inputs, 5u) << "x and the four parameters, and nothing is read in the graph itself\n" << seen.text;
  });
}

struct UsedTwice : nn::Module {
  nn::Parameter param{pattern({3}, 1)};
  nn::Buffer buf{pattern({3}, 2)};
  CHORALE_MODULE(UsedTwice, param, buf)
  Tensor forward(const Tensor& x) { return (x + param) * param + (x + buf) * buf; }
};

// spec: test_fsdp_dup_tensors_same_source
TEST(CompiledFullySharded, ATensorThatIsUsedTwiceIsOneInput) {
  run_ranks(1, [](comm::Group& group) {
    UsedTwice plain, model;
    fully_shard(model, {.mesh = Mesh(group, {1}, {"shard"})});
    const Tensor x = pattern({2, 3}, 3);
    SeenGraphs seen;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
    expect_pd(f(x), plain(x));
    EXPECT_EQ(seen.inputs, 3u) << seen.text;
  });
}

struct Child : nn::Module {
  nn::Buffer buf;
  CHORALE_MODULE(Child, buf)
  Tensor forward(const Tensor& x) {
    mul_(buf, 2.0);
    return x + buf;
  }
};
struct Parent : nn::Module {
  nn::Parameter param{pattern({1}, 1)};
  nn::Buffer buf{full({3}, 0.25)};
  Child child;
  CHORALE_MODULE(Parent, param, buf, child)
  Parent() { child.buf = buf; }
  Tensor forward(const Tensor& x) { return child(x) + buf + param; }
};

// spec: test_fsdp_dup_tensors_diff_source
TEST(CompiledFullySharded, ATensorOfTwoModulesIsCompiledOnce) {
  run_ranks(1, [](comm::Group& group) {
    Parent plain, model;
    fully_shard(model, {.mesh = Mesh(group, {1}, {"shard"})});
    const Tensor x = pattern({2, 3}, 3);
    SeenGraphs seen;
    auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
    for (int i = 0; i < 15; ++i) expect_pd(f(x), plain(x));
    EXPECT_EQ(seen.count, 1);
    EXPECT_EQ(model.buf.to_vector<float>(), plain.buf.to_vector<float>());
  });
}

struct WithHelper : nn::Module {
  nn::Parameter p{pattern({3}, 42)};
  CHORALE_MODULE(WithHelper, p)
  bool through_object = false;
  static Tensor twice(const Tensor& x) { return x * 2.0; }
  // NOLINTNEXTLINE(readability-static-accessed-through-instance): that both ways give one graph is what is tested
  Tensor forward(const Tensor& x) { return through_object ? this->twice(x + p) : WithHelper::twice(x + p); }
};

// spec: test_fsdp_staticmethod
TEST(CompiledFullySharded, AFunctionOfTheClassAndOfTheObjectGiveOneGraph) {
  run_ranks(1, [](comm::Group& group) {
    std::string texts[2];
    for (const bool through_object : {false, true}) {
      WithHelper plain, model;
      model.through_object = through_object;
      fully_shard(model, {.mesh = Mesh(group, {1}, {"shard"})});
      const Tensor x = pattern({2, 3}, 3);
      SeenGraphs seen;
      auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = watching(seen)});
      expect_pd(f(x), plain(x));
      EXPECT_EQ(seen.count, 1);
      texts[through_object ? 1 : 0] = seen.text;
    }
    EXPECT_EQ(texts[0], texts[1]);
  });
}

struct TwoLinears : nn::Module {
  nn::Linear a{100, 100}, b{100, 100};
  CHORALE_MODULE(TwoLinears, a, b)
  int calls = 0;
  Tensor forward(const Tensor& x) {
    ++calls;
    return b(a(x));
  }
};
struct Outer : nn::Module {
  TwoLinears first, second;
  bool checkpoints = false;
  CHORALE_MODULE(Outer, first, second)
  Tensor forward(const Tensor& x) {
    const auto run = [&](TwoLinears& inner, const Tensor& in) {
      if (!checkpoints) return inner(in);
      return checkpoint([&](const std::vector<Tensor>& t) { return std::vector{inner(t[0])}; }, {in})[0];
    };
    return relu(run(second, relu(run(first, x))));
  }
};

// Two sharded modules without one around them: each has let its parameters go when the backward has ended, as in eager.
TEST(CompiledFullySharded, ModulesWithoutARootLetTheirParametersGo) {
  run_ranks(2, [](comm::Group& group) {
    for (const bool compiled : {false, true}) {
      manual_seed(3);
      Outer model;
      for (TwoLinears* inner : {&model.first, &model.second}) fully_shard(*inner, {.mesh = line(group)});
      auto f = compile([&](const Tensor& in) { return model(in); });
      for (int step = 0; step < 2; ++step) {
        const Tensor x = pattern({100, 100}, step);
        backward(sum(compiled ? f(x) : model(x)));
        for (const auto& [name, parameter] : model.named_parameters()) {
          EXPECT_TRUE(parameter.is_sharded()) << name << compiled << step;
        }
      }
    }
  });
}

// A graph for each sharded module, and nothing else with layers in it. There is no node of a checkpoint: what surrounds
// the module is sent again, so its forward runs again on the host.
// spec: test_fsdp_activation_checkpointing
TEST(CompiledFullySharded, CheckpointedModulesHaveGraphsOfTheirOwnAndAreComputedAgain) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    Outer plain;
    const Tensor x = pattern({100, 100}, 1), expected = plain(x);
    backward(sum(expected));
    for (const bool checkpoints : {false, true}) {
      Outer model = nn::clone(plain);
      model.checkpoints = checkpoints;
      for (TwoLinears* inner : {&model.first, &model.second}) fully_shard(*inner, {.mesh = line(group)});
      fully_shard(model, {.mesh = line(group)});
      int layers = 0;
      const compiled::Backend backend = [&, run = codegen::fused()](graph::Graph graph, const GraphInfo& info) {
        layers += graph::print(graph).find("linear(") != std::string::npos ? 1 : 0;
        return run(std::move(graph), info);
      };
      auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = backend});
      const Tensor y = f(x);
      expect_p4(y, expected);
      EXPECT_EQ(layers, 2) << checkpoints;
      const int first_calls = model.first.calls, second_calls = model.second.calls;
      backward(sum(y));
      EXPECT_EQ(layers, 2) << checkpoints;
      EXPECT_EQ(model.first.calls, first_calls + (checkpoints ? 1 : 0));
      EXPECT_EQ(model.second.calls, second_calls + (checkpoints ? 1 : 0));
      const NamedTensors own = model.named_parameters(), whole = plain.named_parameters();
      for (size_t i = 0; i < own.size(); ++i)
        expect_p4(full_tensor(gradient(own[i].second)), gradient(whole[i].second), own[i].first);
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
