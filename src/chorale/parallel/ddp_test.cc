#include "chorale/parallel/ddp.h"

#include "chorale/base/error.h"
#include "chorale/optim/clip.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

TEST(Ddp, AModuleWithNothingToTrainIsRefused) {
  // spec: test_DistributedDataParallel_requires_grad
  run_ranks(2, [](comm::Group& group) { EXPECT_THROW(DistributedDataParallel(nn::Identity(), group), StateError); });
}

TEST(Ddp, ALayerWithoutOutputsIsNoTrouble) {
  // spec: test_ddp_zero_output_features
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(nn::Sequential(Linear(10, 10), Linear(10, 0)), group);
    backward(sum(ddp(ones({2, 10}))));
    EXPECT_TRUE(gradient(ddp.parameters()[0]).defined());
  });
}

TEST(Ddp, RanksStartFromTheStateOfTheFirst) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(BatchNormNet(), group.rank()), group);
    const BatchNormNet first = seeded(BatchNormNet(), 0);
    expect_equal_parameters(ddp.module(), first);
    for (const Tensor& p : ddp.parameters()) expect_same_on_all_ranks(group, p);
  });
}

// spec: test_ddp_sync_module_states
TEST(Ddp, StatesAreTakenFromAnyRankOnRequest) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Linear(2, 2, {.bias = false}), group.rank()), group);
    ddp.module() = seeded(Linear(2, 2, {.bias = false}), 10 + group.rank());
    EXPECT_EQ(equal_bits(ddp.module().weight, seeded(Linear(2, 2, {.bias = false}), 11).weight), group.rank() == 1);
    ddp.sync_module_states(1);
    EXPECT_TRUE(equal_bits(ddp.module().weight, seeded(Linear(2, 2, {.bias = false}), 11).weight));
  });
}

// spec: test_verify_model_across_rank_with_logger, test_verify_model_across_rank_without_logger
TEST(Ddp, TheCheckOfParametersNamesRankAndParameter) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(EmbNet(0), group);
    ddp.module().lin = Linear(group.rank() == 0 ? 100 : 10, 1);
    const std::string error =
        message_of<StateError>([&] { verify_parameters(group, managed_parameters(ddp.module())); });
    EXPECT_FALSE(ddp.log().has_error);
    EXPECT_TRUE(has(error, "rank 1: parameter 1 (lin.weight)"));
    EXPECT_TRUE(has(error, "[1, 10]"));
    EXPECT_TRUE(has(error, "does not match rank 0"));
    EXPECT_TRUE(has(error, "[1, 100]"));
    group.barrier().wait();
    EXPECT_EQ(message_of<StateError>([&] { ddp.verify_parameters(); }), error);
    EXPECT_EQ(ddp.log().error, error);
    group.barrier().wait();
  });
}

// spec: test_compute_bucket_assignment_by_size_sparse_error_with_logger
TEST(Ddp, SparseTensorsHaveNoBucketsAndTheLogSaysSo) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(TwoLin(), group);
    std::vector<Tensor> tensors;
    for (int i = 0; i < 3; ++i) {
      for (const auto& [elems, dtype] : {std::pair{50, DType::kF32}, std::pair{25, DType::kF64}}) {
        tensors.push_back(Tensor::sparse_coo(zeros({1, 1}, DType::kI64), ones({1}, dtype), {elems}));
      }
    }
    const std::vector<size_t> limits{400};
    const std::string error = message_of<StateError>([&] { ddp.assign_buckets(tensors, limits); });
    EXPECT_TRUE(has(error, "sparse"));
    EXPECT_TRUE(ddp.log().has_error);
    EXPECT_EQ(ddp.log().error, error);
    for (Tensor& tensor : tensors) tensor = empty(tensor.sizes(), tensor.dtype());
    EXPECT_EQ(ddp.assign_buckets(tensors, limits).buckets,
              (std::vector<std::vector<size_t>>{{0, 2}, {1, 3}, {4}, {5}}));
  });
}

// spec: test_ddp_model_diff_shape_across_ranks
TEST(Ddp, ShapesThatDifferAreAnErrorOnAllRanksAndTheGroupGoesOn) {
  run_ranks(2, [](comm::Group& group) {
    const std::string error = message_of<StateError>([&] { DistributedDataParallel ddp(EmbNet(group.rank()), group); });
    EXPECT_TRUE(has(error, "rank 1: parameter 0 (embedding.weight)"));
    EXPECT_TRUE(has(error, "[10, 50]"));
    EXPECT_TRUE(has(error, "[10, 500]"));
    group.barrier().wait();
  });
}

struct One : nn::Module {
  nn::Parameter p;
  CHORALE_MODULE(One, p)
  Tensor forward(const Tensor& x) { return mul(p, x); }
};

TEST(Ddp, StridesAndDtypesThatDifferAreErrors) {
  run_ranks(2, [](comm::Group& group) {
    One strided, typed;
    const bool first = group.rank() == 0;
    strided.p =
        nn::Parameter(first ? Tensor::empty({2, 3}, DType::kF32) : Tensor::empty_strided({2, 3}, {1, 2}, DType::kF32));
    EXPECT_TRUE(has(message_of<StateError>([&] { DistributedDataParallel ddp(strided, group); }), "strides [1, 2]"));
    typed.p = nn::Parameter(Tensor::empty({2}, first ? DType::kF32 : DType::kF64));
    EXPECT_TRUE(has(message_of<StateError>([&] { DistributedDataParallel ddp(typed, group); }), "f64"));
  });
}

// spec: test_ddp_model_diff_num_params_across_ranks
TEST(Ddp, NumbersOfParametersThatDifferAreToldToEveryRank) {
  run_ranks(2, [](comm::Group& group) {
    const int r = group.rank();
    const std::string error = message_of<StateError>([&] { DistributedDataParallel ddp(EmbNet(0, r == 1), group); });
    EXPECT_TRUE(has(error, r == 0 ? "rank 0 has 3" : "rank 1 has 4"));
    EXPECT_TRUE(has(error, r == 0 ? "rank 1 has 4" : "rank 0 has 3"));
    group.barrier().wait();
  });
}

// spec: test_ddp_build_debug_param_to_name_mapping, test_ddp_build_debug_param_to_name_mapping_requires_grad
TEST(Ddp, ParametersAreNumberedByName) {
  using Names = std::vector<std::string>;
  const TwoLin net;
  std::vector<Tensor> tensors = net.parameters();
  EXPECT_EQ(parameter_names(net, tensors), (Names{"a.weight", "b.weight"}));
  EXPECT_EQ(parameter_names(net, {net.b.weight}, {"a.weight"}), (Names{"b.weight"}));
  tensors.push_back(ones({1}));
  tensors.push_back(ones({1}));
  const std::string lengths = message_of<InvalidArgument>([&] { parameter_names(net, tensors); });
  EXPECT_TRUE(has(lengths, "4 parameters"));
  EXPECT_TRUE(has(lengths, "has 2"));
  EXPECT_TRUE(has(message_of<InvalidArgument>([&] { parameter_names(net, {tensors[0]}); }), "b.weight"));

  Linear frozen(10, 10);
  set_requires_grad(frozen.bias, false);
  EXPECT_EQ(parameter_names(frozen, {frozen.weight}), (Names{"weight"}));
}

// spec: test_get_data_parallel_params
TEST(Ddp, IgnoredParametersAreNotManaged) {
  run_ranks(2, [](comm::Group& group) {
    const TwoLin net;
    DistributedDataParallel ddp(net, group, {.ignore = {"a.weight"}});
    ASSERT_EQ(ddp.managed_parameters().size(), net.parameters().size() - 1);
    EXPECT_EQ(ddp.managed_parameters()[0].first, "b.weight");
    EXPECT_TRUE(ddp.managed_parameters()[0].second.is(net.b.weight));
    EXPECT_EQ(managed_parameters(net, {"a.weight"}).size(), 1u);
  });
}

class Views : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Ddp, Views, testing::Bool(), [](const auto& p) { return p.param ? "Views" : "Copies"; });

// spec: test_DistributedDataParallelCPU, test_DistributedDataParallelCPU_grad_is_view
TEST_P(Views, TrainingOnPartsOfABatchEqualsTrainingOnTheWhole) {
  for (int size : {2, 3, 4}) {
    run_ranks(size, [](comm::Group& group) {
      DistributedDataParallel ddp(seeded(Net(), group.rank()), group,
                                  {.find_unused_parameters = FindUnused::kOff, .gradient_as_bucket_view = GetParam()});
      Net reference = nn::clone(ddp.module());
      const int64_t rows = 2 * group.size();
      parity_loop(ddp, reference, pattern({rows, 2}, 1), pattern({rows, 4}, 2), 2, 2 * group.rank());
      Net loaded;
      loaded.load_state_dict(ddp.module().state_dict());
      expect_equal_parameters(loaded, ddp.module());
    });
  }
}

// spec: test_DistributedDataParallel
TEST_P(Views, AStaticGraphAndAReloadedStateChangeNothing) {
  for (bool declared : {false, true}) {
    run_ranks(3, [declared](comm::Group& group) {
      const DdpOptions options{
          .find_unused_parameters = FindUnused::kOff, .gradient_as_bucket_view = GetParam(), .static_graph = declared};
      Net reference = seeded(Net(), 1);
      auto state = reference.state_dict();
      for (int round = 0; round < 2; ++round) {
        // Saved, loaded and wrapped again.
        Net fresh = seeded(Net(), 50);
        fresh.load_state_dict(state);
        DistributedDataParallel ddp(fresh, group, options);
        if (declared) ddp.set_static_graph();  // the second time only warns
        parity_loop(ddp, reference, pattern({group.size(), 2}, 1), pattern({group.size(), 4}, 2), 1, group.rank());
        state = ddp.module().state_dict();
      }
    });
  }
}

TEST_P(Views, GradientsAreBucketViewsOnlyWhereThatWasAskedFor) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), 0), group, {.gradient_as_bucket_view = GetParam()});
    EXPECT_FALSE(gradient(ddp.module().fc1.weight).defined());  // not pointed at buckets by construction
    for (int step = 0; step < 3; ++step) {
      backward(sum(ddp(ones({2, 2}))));
      const Tensor g1 = gradient(ddp.module().fc1.weight), g3 = gradient(ddp.module().fc3.weight);
      EXPECT_EQ(g1.storage() == g3.storage(), GetParam());
      if (step == 1) ddp.zero_grad(true);
    }
    EXPECT_FALSE(gradient(ddp.module().fc2.bias).defined());
  });
}

struct Square : nn::Module {
  nn::Parameter p{Tensor::scalar(1.0, DType::kF32)};
  CHORALE_MODULE(Square, p)
  Tensor forward() { return mul(p, p); }
};

TEST_P(Views, GradientsAreLaidOutLikeTheirParametersIfThoseAreDense) {
  run_ranks(2, [](comm::Group& group) {
    nn::Conv2d conv(2, 3, {.kernel = {2}});
    const Tensor weight = Tensor::empty_strided({3, 2, 2, 2}, {8, 1, 4, 2}, DType::kF32);  // channels last
    {
      const NoGrad quiet;
      copy_(weight, pattern({3, 2, 2, 2}, 1));
    }
    conv.weight = nn::Parameter(weight);
    nn::Conv2d reference = nn::clone(conv);
    DistributedDataParallel ddp(conv, group, {.gradient_as_bucket_view = GetParam()});
    const Tensor x = pattern({4, 2, 5, 5}, 2);
    for (int step = 0; step < 3; ++step) {
      backward(mean(mul(ddp(narrow(x, 0, 2 * group.rank(), 2)), 2)));
      backward(mean(mul(reference(x), 2)));
      const Tensor g = gradient(ddp.module().weight);
      EXPECT_TRUE(!GetParam() || g.strides() == weight.strides());
      expect_close(g, gradient(reference.weight));
    }
  });
}

// spec: test_ddp_create_graph
TEST(Ddp, BackwardThatIsRecordedItselfWorks) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Square(), group);
    for (int step = 0; step < 6; ++step) {
      backward(ddp(), {}, {.create_graph = true});
      EXPECT_TRUE(requires_grad(ddp.module().p));
    }
    EXPECT_EQ(gradient(ddp.module().p).item<float>(), 12);
  });
}

struct Sharing : nn::Module {
  Linear net1{10, 5};
  nn::Parameter bias = net1.bias;
  Linear net2{10, 5};
  CHORALE_MODULE(Sharing, bias, net1, net2)
  Tensor forward(const Tensor& x) { return sum(net2(x)); }
};

// spec: test_ddp_shared_grad_acc_unused_params
TEST(Ddp, ASharedTensorCountsOnceAndOutputsMayBeOverwritten) {
  for (bool declared : {false, true}) {
    run_ranks(2, [declared](comm::Group& group) {
      DistributedDataParallel ddp(Sharing(), group,
                                  {.find_unused_parameters = FindUnused::kOn, .static_graph = declared});
      EXPECT_EQ(ddp.managed_parameters().size(), 4u);
      for (int step = 0; step < 6; ++step) {
        const Tensor loss = ddp(ones({2, 10}));
        div_(loss, 10);
        backward(loss);
      }
      EXPECT_FALSE(gradient(ddp.module().bias).defined());
      EXPECT_NEAR(gradient(ddp.module().net2.bias).to_vector<float>()[0], 6 * 0.2, 1e-5);
    });
  }
}

// spec: test_ddp_forward_backward_hook
TEST(Ddp, HooksOfTheModuleRun) {
  run_ranks(2, [](comm::Group& group) {
    Linear plain = seeded(Linear(2, 2), 0), wrapped = nn::clone(plain);
    const auto add_hooks = [](nn::Module& module) {
      module.before_forward([](nn::Module&, std::vector<Tensor>& inputs) { inputs[0] = relu(inputs[0]); });
      module.after_forward(
          [](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& outputs) { outputs[0] = gelu(outputs[0]); });
      module.after_backward([](std::vector<Tensor>& gradients, const std::vector<Tensor>&) {
        for (Tensor& g : gradients) g = g.defined() ? tanh(g) : g;
      });
    };
    add_hooks(plain);
    add_hooks(wrapped);
    DistributedDataParallel ddp(wrapped, group);
    const Tensor x = pattern({5, 2}, 3), x2 = pattern({5, 2}, 3);
    set_requires_grad(x);
    set_requires_grad(x2);
    const Tensor y = plain(x), z = ddp(x2);
    expect_close(z, y);
    backward(sum(y));
    backward(sum(z));
    expect_equal_gradients(ddp.module(), plain);
    expect_close(gradient(x2), gradient(x));
  });
}

// spec: test_ddp_inference
TEST(Ddp, OneRankMayEvaluateAlone) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), 1), group);
    Net local = nn::clone(ddp.module());
    ddp.eval();
    const int64_t before = ddp.group().sequence_number();
    if (group.rank() == 0) {
      for (int i = 0; i < 6; ++i) expect_close(ddp(pattern({3, 2}, i)), local(pattern({3, 2}, i)));
    }
    EXPECT_EQ(ddp.group().sequence_number(), before);
  });
  // Without running statistics a batch norm normalizes by the batch also when it evaluates: by that of the rank alone.
  run_ranks(2, [](comm::Group& group) {
    nn::BatchNorm1d norm = seeded(nn::BatchNorm1d(2, {.track_running_stats = false}), 1), local = nn::clone(norm);
    convert_sync_batchnorm(norm, group);
    const comm::Group& statistics = dynamic_cast<const SyncStatistics&>(*norm.statistics()).group();
    DistributedDataParallel ddp(norm, group);
    ddp.eval();
    local.eval();
    const int64_t before = ddp.group().sequence_number(), statistics_before = statistics.sequence_number();
    if (group.rank() == 0) {
      for (int i = 0; i < 6; ++i) expect_close(ddp(pattern({3, 2}, i)), local(pattern({3, 2}, i)));
    }
    EXPECT_EQ(ddp.group().sequence_number(), before);
    EXPECT_EQ(statistics.sequence_number(), statistics_before);
  });
}

struct Remembers : nn::Module {
  Linear lin{10, 10};
  Tensor last;
  CHORALE_MODULE(Remembers, lin)
  Tensor forward(const Tensor& x) { return last = lin(x); }
};

// spec: test_ddp_sink_noclone
TEST(Ddp, OutputsAreNotCopied) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Remembers(), group, {.find_unused_parameters = FindUnused::kOn});
    const Tensor y = ddp(ones({2, 10}));
    EXPECT_EQ(y.raw(), ddp.module().last.raw());
    backward(sum(y));
  });
}

// An op whose backward throws.
struct Fails : Function {
  const char* name() const override { return "fails"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { throw StateError("backward fails"); }
};

// spec: test_ddp_remove_autograd_hooks
TEST(Ddp, AModuleCanBeWrappedAnewAfterAFailedBackward) {
  run_ranks(2, [](comm::Group& group) {
    Linear net = seeded(Linear(10, 10), group.rank());
    DistributedDataParallel first(net, group);
    int reductions = 0;
    first.register_comm_hook({"counting", [&reductions](GradBucket& bucket) {
                                ++reductions;
                                return bucket.group().all_reduce(bucket.buffer()).future();
                              }});
    const Tensor y = first(apply<Fails>({set_requires_grad(ones({2, 10}))})[0]);
    EXPECT_THROW(backward(sum(y)), StateError);
    first.remove_hooks();
    net.zero_grad();
    // The first wrapper is still there, and does nothing any more.
    const int before = reductions;
    const int64_t calls = first.group().sequence_number();
    DistributedDataParallel second(net, group);
    Linear local = nn::clone(net);
    for (int step = 0; step < 3; ++step) {
      second.zero_grad();
      local.zero_grad();
      backward(sum(second(pattern({2, 10}, step + 10 * group.rank()))));
      for (int rank : {0, 1}) backward(mul(sum(local(pattern({2, 10}, step + 10 * rank))), 0.5));
      expect_equal_gradients(second.module(), local);
    }
    EXPECT_EQ(reductions, before);
    EXPECT_EQ(first.group().sequence_number(), calls);
  });
}

TEST(Ddp, GradientsThatAreOnlyAskedForAreNotReduced) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Linear(3, 1, {.bias = false}), 0), group);
    const Tensor x = set_requires_grad(ones({1, 3}));
    // Only one rank asks.
    if (group.rank() == 0) {
      const Tensor dx = grad({sum(ddp(x))}, {x})[0];
      expect_close(dx, detach(ddp.module().weight));
      EXPECT_FALSE(gradient(ddp.module().weight).defined());
    }
    backward(sum(ddp(x)));
    expect_close(gradient(ddp.module().weight), ones({1, 3}));
  });
}

TEST(Ddp, TwoBackwardPassesOfTwoForwardsAreBothReduced) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Linear(1, 1, {.bias = false}), group);
    const auto r = static_cast<float>(group.rank());
    const Tensor y1 = ddp(Tensor::from<float>({r}, {1, 1})), y2 = ddp(Tensor::from<float>({10 * r}, {1, 1}));
    backward(y1);
    EXPECT_EQ(gradient(ddp.module().weight).item<float>(), 0.5f);
    backward(y2);
    EXPECT_EQ(gradient(ddp.module().weight).item<float>(), 5.5f);
  });
}

// The norm is that of the averages, so all ranks scale alike, and as one rank does that has the whole batch.
TEST_P(Views, GradientsAreClippedByTheNormOfTheWholeBatch) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), 1), group, {.gradient_as_bucket_view = GetParam()});
    Net reference = nn::clone(ddp.module());
    const int64_t rows = 2 * group.size();
    const Tensor x = pattern({rows, 2}, 1), y = pattern({rows, 4}, 2);
    for (int step = 0; step < 3; ++step) {
      backward(mse_loss(reference(x), y));
      backward(mse_loss(ddp(narrow(x, 0, 2 * group.rank(), 2)), narrow(y, 0, 2 * group.rank(), 2)));
      const double norm = optim::clip_grad_norm(reference.parameters(), 0.01);
      EXPECT_GT(norm, 0.01);
      EXPECT_NEAR(optim::clip_grad_norm(ddp.parameters(), 0.01), norm, 1e-5 * norm);
      expect_equal_gradients(ddp.module(), reference);
      for (const Tensor& p : ddp.parameters()) {
        if (gradient(p).defined()) expect_same_on_all_ranks(group, gradient(p));
      }
      ascend(reference);
      ascend(ddp.module());
      reference.zero_grad();
      ddp.zero_grad();
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
