// Parameters without gradient, control flow, outputs left out of the loss, and passes that are not reduced.
#include "chorale/base/comm_error.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

const DdpOptions kSearchOff{.find_unused_parameters = FindUnused::kOff};
const DdpOptions kSearchOn{.find_unused_parameters = FindUnused::kOn};

// Errors name parameters at every level; at the highest each collective is checked first.
void run_at_every_level(int ranks, const std::function<void(comm::Group&)>& body) {
  const DebugLevel before = debug_level();
  for (DebugLevel level : {DebugLevel::kOff, DebugLevel::kInfo, DebugLevel::kDetail}) {
    set_debug_level(level);
    run_ranks(ranks, body);
  }
  set_debug_level(before);
}

// ---- no_sync

// Micro-batch 0 accumulates, micro-batch 1 is reduced: then gradients are those of the reference, which has seen all.
void accumulate_without_sync(const comm::Group& group, bool views, int steps, const std::optional<CommHook>& hook) {
  DistributedDataParallel ddp(
      seeded(Net(), 0), group,
      {.find_unused_parameters = FindUnused::kOff, .gradient_as_bucket_view = views, .bucket_cap_mb = 0.001});
  if (hook) ddp.register_comm_hook(*hook);
  Net reference = nn::clone(ddp.module());
  const int64_t rows = group.size();
  {
    const auto scope = ddp.no_sync();
    const NoGrad quiet;
    ddp(pattern({1, 2}, 1));
  }
  for (int i = 0; i < steps; ++i) {
    const Tensor x = pattern({rows, 2}, 1337 + i), y = pattern({rows, 4}, 7);
    backward(mse_loss(reference(x), y));
    const auto local = [&] { backward(mse_loss(ddp(narrow(x, 0, group.rank(), 1)), narrow(y, 0, group.rank(), 1))); };
    if (i % 2 == 0) {
      const auto scope = ddp.no_sync();
      local();
    } else {
      local();
    }
    const auto own = ddp.module().parameters();
    const auto other = reference.parameters();
    for (size_t p = 0; p < own.size(); ++p) {
      if (!requires_grad(own[p])) continue;
      const bool close = sum(abs(sub(gradient(own[p]), gradient(other[p])))).item<double>() < 1e-5;
      EXPECT_EQ(close, i % 2 == 1) << "step " << i << ", parameter " << p;
    }
  }
}

// spec: test_accumulate_gradients_no_sync, test_accumulate_gradients_no_sync_grad_is_view
TEST(NoSync, GradientsAccumulateUntilAPassThatIsReduced) {
  for (bool views : {false, true}) {
    run_ranks(2, [views](comm::Group& group) { accumulate_without_sync(group, views, 2, {}); });
    run_ranks(3, [views](comm::Group& group) { accumulate_without_sync(group, views, 4, {}); });
  }
}

// spec: test_accumulate_gradients_no_sync_allreduce_hook
TEST(NoSync, AHookSeesWhatHasAccumulated) {
  run_ranks(3, [](comm::Group& group) {
    accumulate_without_sync(group, true, 4, CommHook{"average", [](GradBucket& bucket) {
                                                       div_(bucket.buffer(), bucket.group().size());
                                                       return bucket.group().all_reduce(bucket.buffer()).future();
                                                     }});
  });
}

// spec: test_accumulate_gradients_no_sync_allreduce_with_then_hook
TEST(NoSync, WhatAHookChainsBecomesTheGradients) {
  run_ranks(3, [](comm::Group& group) {
    const CommHook hook{"average", [](GradBucket& bucket) {
                          const int size = bucket.group().size();
                          return bucket.group()
                              .all_reduce(bucket.buffer())
                              .future()
                              .then([](const Tensors& sums) { return Tensors{mul(sums[0], 2)}; })
                              .then([size](const Tensors& twice) { return Tensors{div(twice[0], 2 * size)}; });
                        }};
    accumulate_without_sync(group, true, 4, hook);
  });
}

struct Four : nn::Module {
  std::vector<Linear> lin;
  size_t first = 0;
  CHORALE_MODULE(Four, lin)
  Four() {
    for (int i = 0; i < 4; ++i) lin.emplace_back(1, 1);
  }
  Tensor forward(const Tensor& x, int which) { return lin[first + static_cast<size_t>(which)](x); }
};

// spec: test_grads_same_across_ranks_with_no_sync
TEST(NoSync, UsageInsideCounts) {
  for (FindUnused search : {FindUnused::kOn, FindUnused::kAuto}) {
    run_ranks(3, [search](comm::Group& group) {
      DistributedDataParallel ddp(seeded(Four(), 1), group, {.find_unused_parameters = search});
      ddp.module().first = group.rank() == 0 ? 0 : 2;
      {
        const auto scope = ddp.no_sync();
        backward(sum(ddp(ones({1, 1}), 0)));
      }
      backward(sum(ddp(ones({1, 1}), 1)));
      for (const Tensor& p : ddp.parameters()) {
        ASSERT_TRUE(gradient(p).defined());
        expect_same_on_all_ranks(group, gradient(p));
      }
    });
  }
}

TEST(NoSync, IsDecidedByTheForward) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Linear(1, 1), 1), group);
    const Tensor x = full({1, 1}, group.rank());
    const auto slope = [&] { return gradient(ddp.module().weight).item<float>(); };
    Tensor loss;
    {
      const auto scope = ddp.no_sync();
      loss = sum(ddp(x));
    }
    backward(loss);
    EXPECT_EQ(slope(), group.rank());
    ddp.zero_grad();
    loss = sum(ddp(x));
    {
      const auto scope = ddp.no_sync();
      backward(loss);
    }
    EXPECT_EQ(slope(), 0.5f);
  });
}

// ---- errors at the next forward

struct Two : nn::Module {
  Linear net1{10, 10, {.bias = false}}, net2{10, 10, {.bias = false}};
  CHORALE_MODULE(Two, net1, net2)
  Tensor forward(const Tensor& x) { return net1(x); }
};

// spec: test_ddp_unused_params_rebuild_buckets_exception
TEST(Unused, WithoutSearchTheNextForwardNamesWhatGotNoGradient) {
  run_at_every_level(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Two(), group, kSearchOff);
    backward(sum(ddp(ones({2, 10}))));
    EXPECT_FALSE(ddp.log().has_error);
    const std::string error = message_of<StateError>([&] { ddp(ones({2, 10})); });
    EXPECT_TRUE(has(error, "did not finish"));
    EXPECT_TRUE(has(error, "rank " + std::to_string(group.rank())));
    EXPECT_TRUE(has(error, "parameters without gradient: 1 (net2.weight)"));
    EXPECT_TRUE(has(error, "set find_unused_parameters to auto or on"));
    EXPECT_TRUE(has(error, "All outputs"));
    EXPECT_TRUE(has_not(error, "find_unused_parameters is not off"));
    EXPECT_TRUE(has_not(error, "net1"));
    EXPECT_TRUE(ddp.log().has_error);
    EXPECT_EQ(ddp.log().error, error);
  });
}

Tensor random_or_ones(int step) { return step % 2 == 0 ? pattern({20, 10}, step) : ones({20, 10}); }

// spec: test_ddp_control_flow_same_across_ranks
TEST(Unused, ControlFlowMayChangeFromStepToStep) {
  for (FindUnused search : {FindUnused::kOn, FindUnused::kAuto}) {
    run_at_every_level(3, [search](comm::Group& group) {
      DistributedDataParallel ddp(CtrlFlow(), group, {.find_unused_parameters = search});
      for (int step = 0; step < 6; ++step) {
        backward(sum(ddp(random_or_ones(step))));
        const int32_t all = group.size();
        EXPECT_EQ(ddp.reducer().used_map(), (std::vector<int32_t>{all, step % 2 == 0 ? 0 : all})) << step;
      }
    });
  }
  run_at_every_level(2, [](comm::Group& group) {
    DistributedDataParallel ddp(CtrlFlow(), group, kSearchOff);
    backward(sum(ddp(random_or_ones(0))));
    EXPECT_TRUE(has(message_of<StateError>([&] { ddp(random_or_ones(0)); }), "1 (lin2.weight)"));
  });
}

// spec: test_ddp_control_flow_different_across_ranks
TEST(Unused, ControlFlowMayDifferFromRankToRank) {
  for (FindUnused search : {FindUnused::kOn, FindUnused::kAuto}) {
    run_at_every_level(3, [search](comm::Group& group) {
      CtrlFlow net;
      net.only_rank = 1;
      net.rank = group.rank();
      DistributedDataParallel ddp(net, group, {.find_unused_parameters = search});
      for (int step = 0; step < 6; ++step) {
        backward(sum(ddp(random_or_ones(step))));
        const int32_t all = group.size();
        EXPECT_EQ(ddp.reducer().used_map(), (std::vector<int32_t>{all, step % 2 == 0 ? 0 : 1})) << step;
        if (step > 0) expect_same_on_all_ranks(group, gradient(ddp.module().lin2.weight));
      }
    });
  }
  run_at_every_level(2, [](comm::Group& group) {
    DistributedDataParallel ddp(CtrlFlow(), group, kSearchOff);
    backward(sum(ddp(random_or_ones(0))));
    EXPECT_TRUE(has(message_of<StateError>([&] { ddp(random_or_ones(0)); }), "1 (lin2.weight)"));
  });
}

struct Nested : nn::Module {
  EmbNet embedding_net{0};
  TwoLin lin;
  BatchNormNet bn;
  Linear bn_to_lin{4, 10, {.bias = false}};
  CHORALE_MODULE(Nested, embedding_net, lin, bn, bn_to_lin)
  Tensor forward(const Tensor& x) { return std::get<0>(lin(bn_to_lin(bn(x)))); }
};

// spec: test_ddp_multiple_nested_unused_params_error, test_ddp_multiple_nested_unused_params_err_ignore_params
TEST(Unused, NamesOfNestedModulesAreThereAndIgnoredOnesAreNot) {
  run_at_every_level(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Nested(), group, kSearchOff);
    backward(sum(ddp(pattern({10, 2}, 1))));
    const std::string error = message_of<StateError>([&] { ddp(pattern({10, 2}, 1)); });
    EXPECT_TRUE(has(error,
                    "parameters without gradient: 0 (embedding_net.embedding.weight), 1 (embedding_net.lin.weight), 2 "
                    "(embedding_net.lin.bias), 4 (lin.b.weight)."));
  });
  run_at_every_level(2, [](comm::Group& group) {
    DistributedDataParallel ddp(
        Nested(), group, {.find_unused_parameters = FindUnused::kOff, .ignore = {"embedding_net.embedding.weight"}});
    backward(sum(ddp(pattern({10, 2}, 1))));
    const std::string error = message_of<StateError>([&] { ddp(pattern({10, 2}, 1)); });
    EXPECT_TRUE(has(error,
                    "parameters without gradient: 0 (embedding_net.lin.weight), 1 (embedding_net.lin.bias), 3 "
                    "(lin.b.weight)."));
  });
}

// ---- outputs left out of the loss

template <class M, class Outputs>
void leave_outputs_out(const comm::Group& group, FindUnused search, bool views, M net, const Outputs& outputs) {
  M local = nn::clone(net);
  DistributedDataParallel ddp(net, group, {.find_unused_parameters = search, .gradient_as_bucket_view = views});
  const auto once = [&](auto& model, bool both) {
    const auto [a, b] = outputs(model(pattern({10, 10}, 1)));
    backward(both ? sum(matmul(a, b)) : sum(b));
  };
  const auto a_of = [](nn::Module& module) { return module.parameters()[0]; };
  once(ddp, false);
  once(local, false);
  EXPECT_FALSE(gradient(a_of(ddp)).defined());
  expect_equal_gradients(ddp.module(), local);
  Tensor after_1;
  for (int step = 0; step < 6; ++step) {
    once(ddp, step < 2);
    once(local, step < 2);
    expect_equal_gradients(ddp.module(), local);
    if (step == 1) after_1 = clone(gradient(a_of(ddp)));
    if (step > 1) {
      EXPECT_TRUE(equal_bits(gradient(a_of(ddp)), after_1)) << step;
    }
  }
}

// spec: test_output_unused_in_loss_tuple_module, test_output_unused_in_loss_dict_module
TEST(Unused, OutputsLeftOutOfTheLossLeaveGradientsAlone) {
  for (FindUnused search : {FindUnused::kOn, FindUnused::kAuto}) {
    for (bool views : {false, true}) {
      run_ranks(3, [=](comm::Group& group) {
        leave_outputs_out(group, search, views, seeded(UnusedTwoLin(), 1), [](const auto& pair) { return pair; });
        leave_outputs_out(group, search, views, seeded(DictOut(), 1), [](const auto& map) {
          return std::pair(map.at("predictions")[0], map.at("predictions")[1]);
        });
      });
    }
  }
}

// spec: test_undefined_grad_parity_unused_parameters
TEST(Unused, AGradientThatIsUndefinedReachesNobody) {
  struct NoGradient : Function {
    const char* name() const override { return "no gradient"; }
    std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
    std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {Tensor()}; }
  };
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Net(), group, kSearchOn);
    for (int step = 0; step < 2; ++step) backward(sum(apply<NoGradient>({ddp(ones({1, 2}))})[0]));
    for (const Tensor& p : ddp.parameters()) EXPECT_FALSE(gradient(p).defined());
    EXPECT_EQ(ddp.reducer().reductions(), 2);
  });
}

// A rank may use nothing at all while others do.
TEST(Unused, ARankWithoutAnyGradientTakesPart) {
  run_ranks(2, [](comm::Group& group) {
    TwoLin net = seeded(TwoLin(), 1);
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      const auto [a, b] = ddp(ones({1, 10}));
      backward(group.rank() == 0 ? mul(sum(b), 0.5) : sum(a));
      EXPECT_NEAR(gradient(net.b.weight).to_vector<float>()[0], 0.25f * static_cast<float>(step + 1), 1e-6);
      EXPECT_NEAR(gradient(net.a.weight).to_vector<float>()[0], 0.5f * static_cast<float>(step + 1), 1e-6);
    }
  });
}

struct Toy : nn::Module {
  Linear lin1{10, 10, {.bias = false}}, lin2{10, 10, {.bias = false}};
  int rank = 0;
  CHORALE_MODULE(Toy, lin1, lin2)
  Tensor forward(const Tensor& x) { return rank == 0 ? lin2(relu(lin1(x))) : relu(lin1(x)); }
};

// spec: test_different_graph_across_ranks
TEST(Unused, GraphsMayDifferAcrossRanks) {
  for (bool declared : {false, true}) {
    run_ranks(2, [declared](comm::Group& group) {
      Toy net = seeded(Toy(), 3);
      net.rank = group.rank();
      DistributedDataParallel ddp(
          net, group,
          {.find_unused_parameters = declared ? FindUnused::kOff : FindUnused::kOn, .static_graph = declared});
      Toy zero = nn::clone(net), one = nn::clone(net);
      zero.rank = 0;
      one.rank = 1;
      for (int step = 0; step < 10; ++step) {
        const Tensor x = pattern({4, 10}, step);
        backward(sum(ddp(x)));
        backward(mul(add(sum(zero(x)), 0), 0.5));
        backward(mul(add(sum(one(x)), 0), 0.5));
        expect_close(gradient(net.lin1.weight), add(gradient(zero.lin1.weight), gradient(one.lin1.weight)), "lin1",
                     1e-5, 1e-4);
        expect_close(gradient(net.lin2.weight), gradient(zero.lin2.weight), "lin2", 1e-5, 1e-4);
      }
      EXPECT_EQ(ddp.log().has_rebuilt_buckets, declared);
    });
  }
}

struct Branches : nn::Module {
  Linear net1{10, 10, {.bias = false}}, net2{10, 10};
  CHORALE_MODULE(Branches, net1, net2)
  Tensor forward(const Tensor& x, bool both) { return both ? net2(net1(x)) : net1(x); }
};

// spec: test_detect_ddp_is_actually_static
TEST(Unused, AGraphThatNeverChangedLooksStatic) {
  run_ranks(2, [](comm::Group& group) {
    for (const auto& [search, both] : {std::pair(FindUnused::kOn, false), std::pair(FindUnused::kOff, true)}) {
      DistributedDataParallel ddp(Branches(), group, {.find_unused_parameters = search});
      for (int step = 0; step < 6; ++step) {
        backward(sum(ddp(ones({1, 10}), both)));
        EXPECT_TRUE(ddp.log().can_set_static_graph);
      }
    }
    DistributedDataParallel ddp(Branches(), group, kSearchOn);
    for (int step = 0; step < 3; ++step) backward(sum(ddp(ones({1, 10}), step % 2 == 0)));
    EXPECT_FALSE(ddp.log().can_set_static_graph);
  });
}

struct Detaching : nn::Module {
  Linear fc1{10, 10}, fc2{10, 10};
  CHORALE_MODULE(Detaching, fc1, fc2)
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor y = fc2(relu(fc1(x)));
    return {detach(x), clone(y)};
  }
};

// ---- an output that the wrapper cannot see

struct HidesOne : nn::Module {
  Linear lin1{1024, 1024}, lin2{1024, 2048};
  Tensor hidden;
  CHORALE_MODULE(HidesOne, lin1, lin2)
  Tensor forward(const Tensor& x) {
    hidden = lin2(x);
    return lin1(x);
  }
};
constexpr double kOneTensorMb = 4096.0 / (1 << 20);

// The catalogue's test_ddp_has_finalized wants this error with search on, too. Here search sees what backward does, and
// not what forward returns, so that there is nothing to wait for (the next test).
TEST(Unused, AReductionThatDidNotFinishIsFoundByTheCheckAndByTheNextForward) {
  // The wrapper passes the first output through its node and does not know of the second. Without search, a rank that
  // leaves the second out of its loss cannot finish.
  run_ranks(3, [](comm::Group& group) {
    const Tensor x = ones({2, 1024});
    DistributedDataParallel ddp(HidesOne(), group,
                                {.find_unused_parameters = FindUnused::kOff, .bucket_cap_mb = kOneTensorMb});
    ddp.check_finished();
    const Tensor first = ddp(x);
    if (group.rank() == 0) {
      backward(sum(first));
      const std::string error = message_of<StateError>([&] { ddp.check_finished(); });
      EXPECT_TRUE(has(error, "parameters without gradient: 2 (lin2.weight), 3 (lin2.bias)"));
      EXPECT_EQ(message_of<StateError>([&] { ddp(x); }), error);
    } else {
      // Rank 0 leaves, and they need not wait for it until the deadline.
      const Tensor loss = add(sum(first), sum(ddp.module().hidden));
      const std::string error = message_of<CommError>([&] { backward(loss); });
      EXPECT_TRUE(has(error, "rank 0"));
    }
  });
}

// With search nothing is awaited that the wrapper did not see in backward itself, so the same program is right.
TEST(Unused, AnOutputThatTheWrapperDoesNotSeeMayBeLeftOutByARank) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(HidesOne(), group,
                                {.find_unused_parameters = FindUnused::kOn, .bucket_cap_mb = kOneTensorMb});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      const Tensor first = ddp(ones({2, 1024}));
      backward(group.rank() == 0 ? sum(first) : add(sum(first), sum(ddp.module().hidden)));
      ddp.check_finished();
      expect_close(gradient(ddp.module().lin1.bias), full({1024}, 2.0));
      expect_close(gradient(ddp.module().lin2.bias), full({2048}, 2.0 * 2 / 3));
    }
    EXPECT_EQ(ddp.reducer().bucket_count(), 4u);
  });
}

// spec: test_ddp_returns_tensor_with_no_grad
TEST(Unused, AnOutputWithoutHistoryStaysSo) {
  for (bool declared : {false, true}) {
    for (FindUnused search : {FindUnused::kOn, FindUnused::kOff}) {
      run_ranks(2, [=](comm::Group& group) {
        DistributedDataParallel ddp(Detaching(), group, {.find_unused_parameters = search, .static_graph = declared});
        for (int step = 0; step < 6; ++step) {
          const auto [x, y] = ddp(ones({1, 10}));
          EXPECT_FALSE(requires_grad(x));
          EXPECT_TRUE(requires_grad(y));
          backward(add(sum(x), sum(y)));
        }
      });
    }
  }
}

}  // namespace
}  // namespace chorale::parallel
