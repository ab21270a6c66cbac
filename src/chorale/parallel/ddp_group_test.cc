// Another group for a wrapper, also after a backward that failed; and errors of one rank.
#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::parallel {
namespace {

struct Fails : Function {
  const char* name() const override { return "fails"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { throw StateError("backward fails"); }
};

// The layers get their gradients from the last to the first; the op that fails is before the first.
struct ThreeLayers : nn::Module {
  Linear a, b, c;
  bool fails = false, uses_third = true;
  CHORALE_MODULE(ThreeLayers, a, b, c)
  explicit ThreeLayers(int64_t width) : a(width, width), b(width, width), c(width, width) {}
  Tensor forward(const Tensor& x) {
    Tensor y = a(x);
    if (fails) y = chorale::apply<Fails>({y})[0];
    y = b(y);
    return uses_third ? c(y) : y;
  }
};

void good_pass(DistributedDataParallel<ThreeLayers>& ddp) {
  ddp.module().fails = false;
  ddp.zero_grad();
  backward(sum(ddp(pattern({2, ddp.module().a.weight.size(1)}, ddp.group().rank()))));
  for (const Tensor& p : ddp.parameters()) expect_same_on_all_ranks(ddp.group(), gradient(p));
}
void failing_pass(DistributedDataParallel<ThreeLayers>& ddp) {
  ddp.module().fails = true;
  const Tensor loss = sum(ddp(pattern({2, ddp.module().a.weight.size(1)}, ddp.group().rank())));
  EXPECT_THROW(backward(loss), StateError);
}

// spec: test_ddp_update_process_group_new_group
TEST(ProcessGroup, CanBeChangedAfterAFailedBackward) {
  run_ranks(4, [](comm::Group& group) {
    comm::Group low = group.new_group({0, 1}), high = group.new_group({1, 2, 3});
    DistributedDataParallel ddp(seeded(ThreeLayers(1024), 1), group,
                                {.find_unused_parameters = FindUnused::kOn, .bucket_cap_mb = 1});
    const auto iterate = [&](const comm::Group& on) {
      if (!on.is_member()) return;
      good_pass(ddp);
      failing_pass(ddp);
    };
    iterate(group);
    for (const comm::Group* next : std::vector<const comm::Group*>{&low, &high, &group}) {
      ddp.set_group(*next);
      iterate(*next);
    }
  });
}

// spec: test_ddp_update_process_group_default_group
TEST(ProcessGroup, TheWorldMayEndAndBeginAgainWithOtherRanks) {
  transport::MemoryStore store;
  run_ranks(4, [&](comm::Group& group) {
    const int rank = group.rank();
    DistributedDataParallel ddp(seeded(ThreeLayers(64), 1), group, {.find_unused_parameters = FindUnused::kOn});
    const auto iterate = [&] {
      good_pass(ddp);
      failing_pass(ddp);
    };
    iterate();
    ddp.set_group({});
    group.destroy();
    if (rank > 0) {
      comm::Group three = comm::Group::connect(store, "three", rank - 1, 3);
      ddp.set_group(three);
      iterate();
      ddp.set_group({});
    }
    comm::Group all = comm::Group::connect(store, "all", rank, 4);
    ddp.set_group(all);
    iterate();
  });
}

// spec: test_ddp_device_mesh_initialization
TEST(ProcessGroup, AMeshOfOneDimensionTakesThePlaceOfAGroup) {
  run_ranks(4, [](comm::Group& group) {
    const comm::Mesh line(group, {4}), grid(group, {2, 2});
    DistributedDataParallel ddp(TwoLin(), {.mesh = line});
    EXPECT_TRUE(ddp.options().mesh == line);
    const auto [a, b] = ddp(pattern({1, 10}, group.rank()));
    backward(add(sum(a), sum(b)));
    expect_same_on_all_ranks(group, gradient(ddp.module().a.weight));
    EXPECT_TRUE(has(message_of<StateError>([&] { DistributedDataParallel both(TwoLin(), group, {.mesh = line}); }),
                    "not both"));
    EXPECT_TRUE(has(message_of<StateError>([&] { DistributedDataParallel two(TwoLin(), {.mesh = grid}); }),
                    "mesh of 2 x 2 ranks"));
  });
}

// spec: test_ddp_update_process_group_grad_undefined
TEST(ProcessGroup, AnUnusedLayerIsNoTroubleAfterwards) {
  for (bool views : {false, true}) {
    run_ranks(2, [views](comm::Group& group) {
      DistributedDataParallel ddp(seeded(ThreeLayers(10), 1), group,
                                  {.find_unused_parameters = FindUnused::kOn, .gradient_as_bucket_view = views});
      failing_pass(ddp);  // the third layer has its gradients by then
      ddp.set_group(group);
      ddp.zero_grad();
      ddp.module().fails = false;
      ddp.module().uses_third = false;
      backward(sum(ddp(pattern({2, 10}, group.rank()))));
      ddp.check_finished();
      // Used layers get the average over ranks, and the third one has no gradient, as on one rank.
      ThreeLayers local = nn::clone(ddp.module());
      local.uses_third = false;
      for (int rank : {0, 1}) backward(mul(sum(local(pattern({2, 10}, rank))), 0.5));
      expect_equal_gradients(ddp.module(), local);
      EXPECT_TRUE(gradient(local.b.weight).defined());
      EXPECT_FALSE(gradient(ddp.module().c.weight).defined() || gradient(ddp.module().c.bias).defined());
    });
  }
}

// spec: test_ddp_update_process_group_no_find_unused
TEST(ProcessGroup, CanBeChangedBeforeAnyPass) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(ThreeLayers(10), 1), group, {.find_unused_parameters = FindUnused::kOff});
    ddp.set_group(group);
    good_pass(ddp);
  });
}

TEST(ProcessGroup, BatchNormsOverAllRanksGoWithIt) {
  run_ranks(4, [](comm::Group& group) {
    BatchNormNet net = seeded(BatchNormNet(), 1);
    convert_sync_batchnorm(net, group);
    DistributedDataParallel ddp(net, group);
    const auto statistics_of = [&](const std::vector<int>& ranks) {
      const bool member = std::find(ranks.begin(), ranks.end(), group.rank()) != ranks.end();
      const Tensor all = pattern({4, 2}, 3);
      if (member) backward(sum(ddp(narrow(all, 0, group.rank(), 1))));
      // What one rank gets on the rows of all members.
      BatchNormNet whole = seeded(BatchNormNet(), 1);
      std::vector<Tensor> rows;
      rows.reserve(ranks.size());
      for (int r : ranks) rows.push_back(narrow(all, 0, r, 1));
      whole(cat(rows, 0));
      if (member) expect_close(ddp.module().bn.running_mean, whole.bn.running_mean);
      const NoGrad quiet;
      fill_(ddp.module().bn.running_mean, 0);
      fill_(ddp.module().bn.running_var, 1);
    };
    statistics_of({0, 1, 2, 3});
    for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, {1, 2, 3}, {0, 1, 2, 3}}) {
      ddp.set_group(group.new_group(ranks));
      statistics_of(ranks);
    }
  });
}

// A caught exception of one rank ends the others' wait; with another group all go on.
TEST(ProcessGroup, OneRanksFailureEndsTheStepOfAllAndTrainingGoesOnInANewGroup) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(ThreeLayers(10), 1), group);
    good_pass(ddp);
    if (group.rank() == 1) {
      failing_pass(ddp);
      ddp.set_group({});  // leaves the group
    } else {
      const Tensor loss = sum(ddp(ones({2, 10})));
      EXPECT_TRUE(has(message_of<CommError>([&] { backward(loss); }), "has left the group; it last entered"));
      EXPECT_TRUE(has(ddp.log().error, "and then threw: backward fails"));
    }
    ddp.set_group(group);
    good_pass(ddp);
    good_pass(ddp);
  });
}

struct ThrowsInForward : nn::Module {
  Linear lin{4, 4};
  bool throws = false;
  CHORALE_MODULE(ThrowsInForward, lin)
  Tensor forward(const Tensor& x) {
    if (throws) throw StateError("forward fails");
    return lin(x);
  }
};

// An exception that leaves the rank's program takes its groups along, and the others learn of it where they wait.
TEST(ProcessGroup, AnExceptionThatARankDoesNotCatchEndsAllRanks) {
  enum class Where { kForward, kBackward, kGradientHook, kCommHook };
  const std::string texts[] = {"forward fails", "backward fails", "hook fails", "hook fails"};
  for (Where where : {Where::kForward, Where::kBackward, Where::kGradientHook, Where::kCommHook}) {
    const auto train = [&](comm::Group& group) {
      const bool throws = group.rank() == 1;
      DistributedDataParallel ddp(seeded(ThrowsInForward(), 1), group);
      if (where == Where::kCommHook) {
        ddp.register_comm_hook({"throwing", [throws](GradBucket& bucket) {
                                  if (throws) throw StateError("hook fails");
                                  return bucket.group().all_reduce(bucket.buffer()).future();
                                }});
      }
      if (where == Where::kGradientHook) {
        after_accumulate(ddp.module().lin.weight, [throws](const Tensor&) {
          if (throws) throw StateError("hook fails");
        });
      }
      ddp.module().throws = throws && where == Where::kForward;
      Tensor x = set_requires_grad(ones({2, 4}));
      if (where == Where::kBackward && throws) x = chorale::apply<Fails>({x})[0];
      backward(sum(ddp(x)));
      if (where == Where::kBackward) backward(sum(ddp(ones({2, 4}))));  // that of rank 1 failed after its reduction
    };
    const auto body = [&](comm::Group& group) {
      if (group.rank() == 1) return train(group);
      try {
        train(group);
        ADD_FAILURE() << "no error";
      } catch (const CommError& failure) {
        EXPECT_EQ(failure.failure().peer, 1) << failure.what();
        EXPECT_TRUE(has(failure.what(), "left the group because of an exception"));
        EXPECT_TRUE(has(failure.what(), concat("and then threw: ", texts[static_cast<size_t>(where)])));
      }
    };
    EXPECT_EQ(message_of<StateError>([&] { run_ranks(3, body); }), texts[static_cast<size_t>(where)]);
    EXPECT_EQ(message_of<StateError>([&] { comm::run_hosts({0, 0, 1}, body); }), texts[static_cast<size_t>(where)]);
  }
}

}  // namespace
}  // namespace chorale::parallel
