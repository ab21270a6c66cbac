// Static graphs, and what a forward may return.
#include "chorale/base/error.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

// spec: test_static_graph_api_cpu
TEST(StaticGraph, MustBeDeclaredBeforeTraining) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Net(), group);
    backward(sum(ddp(ones({1, 2}))));
    const std::string error = message_of<StateError>([&] { ddp.set_static_graph(); });
    EXPECT_TRUE(has(error, "before training"));
    EXPECT_EQ(ddp.log().error, error);
  });
}

// spec: test_invalid_static_graph
TEST(StaticGraph, AGraphThatChangesIsAnError) {
  const Tensor random = pattern({20, 10}, 1), all_ones = ones({20, 10});
  run_ranks(2, [&](comm::Group& group) {
    DistributedDataParallel ddp(CtrlFlow(), group, {.static_graph = true});
    backward(sum(ddp(random)));
    const Tensor loss = sum(ddp(all_ones));
    const std::string error = message_of<StateError>([&] { backward(loss); });
    EXPECT_TRUE(has(error, "the graph has changed"));
    EXPECT_TRUE(has(error, "1 (lin2.weight)"));
    EXPECT_EQ(ddp.log().error, error);
  });
  run_ranks(2, [&](comm::Group& group) {
    DistributedDataParallel ddp(CtrlFlow(), group, {.static_graph = true});
    backward(sum(ddp(all_ones)));
    backward(sum(ddp(random)));
    const std::string error = message_of<StateError>([&] { ddp(all_ones); });
    EXPECT_TRUE(has(error, "did not finish"));
    EXPECT_TRUE(has(error, "declared static"));
    EXPECT_TRUE(has(error, "1 (lin2.weight)"));
    EXPECT_EQ(ddp.log().error, error);
  });
}

// spec: test_static_graph_multi_forward
TEST(StaticGraph, SeveralForwardsBeforeOneBackward) {
  for (bool declared : {false, true}) {
    run_ranks(3, [declared](comm::Group& group) {
      DistributedDataParallel ddp(nn::Sequential(seeded(Linear(10, 10), group.rank()), nn::ReLU()), group,
                                  {.static_graph = declared});
      nn::Sequential local = nn::clone(ddp.module());
      const Tensor x = ones({2, 10});
      for (int step = 0; step < 3; ++step) {
        local.zero_grad();
        ddp.zero_grad();
        backward(add(sum(local(x)), sum(local(x))));
        const Tensor a = sum(ddp(x)), b = sum(ddp(x));
        backward(add(a, b));
        expect_equal_gradients(ddp.module(), local);
      }
    });
  }
}

struct Types {
  Tensor t;
  std::pair<Tensor, std::vector<Tensor>> nested;
  std::map<std::string, std::map<std::string, Tensor>> map;
  int number = 0;
  CHORALE_TENSORS(Types, t, nested, map)
};

struct Nested : nn::Module {
  Linear fc{100, 1};
  CHORALE_MODULE(Nested, fc)
  Types forward(const Tensor& x) {
    Types out;
    out.t = fc(x);
    out.nested = {fc(x), {fc(x), fc(x)}};
    out.map["b"]["c"] = fc(x);
    out.number = 7;
    return out;
  }
};

// spec: test_ddp_static_graph_nested_types
TEST(StaticGraph, OutputsKeepTheirTypesHoweverNested) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel plain(seeded(Nested(), 1), group);
    DistributedDataParallel declared(seeded(Nested(), 1), group, {.static_graph = true});
    for (int step = 0; step < 6; ++step) {
      for (DataParallelBase* ddp :
           {static_cast<DataParallelBase*>(&plain), static_cast<DataParallelBase*>(&declared)}) {
        const Types out = ddp == &plain ? plain(ones({1, 100})) : declared(ones({1, 100}));
        EXPECT_EQ(out.number, 7);
        std::vector<Tensor> parts;
        for (const Tensor& part : tensors_of(out)) parts.push_back(sum(part));
        ASSERT_EQ(parts.size(), 5u);
        backward(sum(stack(parts)));
        ascend(*ddp);
        ddp->zero_grad();
      }
      expect_equal_parameters(plain.module(), declared.module());
    }
  });
}

// Two ways to write a struct of tensors.
struct Fields {
  Tensor a, b;
  int number = 0;
  CHORALE_TENSORS(Fields, a, b)
};
struct PassesOn : nn::Module {
  Linear fc{10, 1};
  const Tensor::Impl *seen_a = nullptr, *seen_b = nullptr;
  CHORALE_MODULE(PassesOn, fc)
  template <class Input>
  Input forward(Input x) {
    auto& [a, b, number] = x;
    seen_a = a.impl();
    seen_b = b.impl();
    b = fc(b);
    return x;
  }
};

// spec: test_ddp_namedtuple
TEST(StaticGraph, InputsAndOutputsThatAreStructsKeepTypeFieldsAndValues) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(PassesOn(), 1), group);
    PassesOn& module = ddp.module();
    const Tensor a = pattern({5, 10}, group.rank()), b = pattern({5, 10}, 7);
    const auto check = [&](const auto& input, const auto& out) {
      static_assert(std::is_same_v<decltype(input), decltype(out)>);
      const auto& [out_a, out_b, number] = out;
      EXPECT_EQ(number, 7);
      EXPECT_TRUE(module.seen_a == a.impl() && module.seen_b == b.impl()) << "other tensors came in";
      EXPECT_TRUE(equal_bits(out_a, a));
      EXPECT_TRUE(equal_bits(out_b, module.fc(b)));
      EXPECT_TRUE(requires_grad(out_b) && !requires_grad(out_a));
    };
    const Fields named{a, b, 7};
    check(named, ddp(named));
    const std::tuple<Tensor, Tensor, int> plain{a, b, 7};
    check(plain, ddp(plain));
  });
}

struct Fresh {
  Tensor y, a, b;
  std::map<std::string, Tensor> more;
  CHORALE_TENSORS(Fresh, y, a, b, more)
};

struct Makes : nn::Module {
  Linear fc1{10, 10}, fc2{10, 10};
  CHORALE_MODULE(Makes, fc1, fc2)
  Fresh forward(const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& c) {
    const Tensor y = fc2(relu(fc1(add(add(x, a), add(b, c)))));
    return {y, ones({1, 10}), zeros({1, 10}), {{"c", ones({1, 10})}}};
  }
};

// spec: test_ddp_new_tensor_in_fwd, test_ddp_new_tensor_in_fwd_static_graph
TEST(StaticGraph, FreshTensorsGainNoHistory) {
  for (bool declared : {false, true}) {
    for (FindUnused search : {FindUnused::kOn, FindUnused::kOff}) {
      run_ranks(2, [=](comm::Group& group) {
        DistributedDataParallel ddp(
            Makes(), group, {.find_unused_parameters = search, .static_graph = declared, .broadcast_buffers = false});
        Tensor a = zeros({1, 10}), b = a, c = a;
        for (int step = 0; step < 2; ++step) {
          const Fresh out = ddp(ones({1, 10}), a, b, c);
          a = out.a;
          b = out.b;
          c = out.more.at("c");
          EXPECT_FALSE(requires_grad(a) || requires_grad(b) || requires_grad(c));
          backward(sum(out.y));
        }
      });
    }
  }
}

TEST(StaticGraph, GivesTheSameOutputsAndGradients) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel plain(seeded(Linear(10, 10), 1), group);
    DistributedDataParallel declared(seeded(Linear(10, 10), 1), group, {.static_graph = true});
    for (int step = 0; step < 6; ++step) {
      const Tensor x = pattern({3, 10}, step + group.rank());
      const Tensor y = plain(x), z = declared(x);
      EXPECT_TRUE(equal_bits(y, z));
      backward(sum(y));
      backward(sum(z));
      EXPECT_TRUE(equal_bits(gradient(plain.module().weight), gradient(declared.module().weight)));
    }
  });
}

struct Segment : Function {
  Linear* layer;
  explicit Segment(Linear* which) : layer(which) {}
  const char* name() const override { return "segment"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    save_for_backward(in);
    return {(*layer)(in[0])};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const EnableGrad record;
    const Tensor x = set_requires_grad(detach(saved()[0]));
    const Tensor y = (*layer)(x);
    chorale::backward(y, dout[0]);
    return {gradient(x)};
  }
};
struct Reentrant : nn::Module {
  Linear first{4, 4}, second{4, 4};
  CHORALE_MODULE(Reentrant, first, second)
  Tensor forward(const Tensor& x) {
    return chorale::apply<Segment>({chorale::apply<Segment>({first(x)}, &second)[0]}, &second)[0];
  }
};

// Backward inside backward, as reentrant checkpointing does it: the outer one ends last.
TEST(StaticGraph, ABackwardInsideABackwardDoesNotEndTheReduction) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Reentrant(), 1), group, {.static_graph = true});
    Reentrant local = nn::clone(ddp.module());
    for (int step = 0; step < 4; ++step) {
      backward(sum(ddp(pattern({2, 4}, 1))));
      backward(sum(local(pattern({2, 4}, 1))));
      expect_equal_gradients(ddp.module(), local);
    }
  });
}

struct Checkpointed : nn::Module {
  Linear first{4, 4}, second{4, 4};
  CHORALE_MODULE(Checkpointed, first, second)
  Tensor forward(const Tensor& x) {
    return checkpoint(
        [this](const std::vector<Tensor>& in) { return std::vector<Tensor>{second(relu(second(in[0])))}; },
        {first(x)})[0];
  }
};

TEST(StaticGraph, ActivationCheckpointingWorksWithDefaultOptions) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Checkpointed(), 1), group);
    Checkpointed local = nn::clone(ddp.module());
    for (int step = 0; step < 3; ++step) {
      backward(sum(ddp(pattern({2, 4}, 1))));
      backward(sum(local(pattern({2, 4}, 1))));
      expect_equal_gradients(ddp.module(), local);
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
