// Distributed autograd under load, with data-parallel modules, with workers that end, and in random programs
// (spec/rpc-and-distributed-autograd.md, B1, B2, B5).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <latch>
#include <random>
#include <thread>

#include "chorale/nn/nn.h"
#include "chorale/parallel/ddp.h"
#include "chorale/rpc/context_test_util.h"
#include "chorale/testing/soak_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Contexts;
using parallel::DistributedDataParallel;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::plus;
using served::product;
using served::times;

Tensor through(const Tensor& a, const Tensor& b, int64_t worker) { return here().call<times>(worker, a, b); }
Tensor plus_ref(const RRef<Tensor>& a, const Tensor& b) { return add(a.to_here(), b); }
RRef<Tensor> kept_on(const Tensor& a, const Tensor& b, int64_t worker) { return here().remote<plus>(worker, a, b); }
Tensor weight_here() { return wanting(pattern({2, 2}, 1)); }
Tensor slow_weight(int64_t ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  return wanting(pattern({2, 2}, 1));
}
int64_t number_here() { return 5; }
Tensor wanting_ones() { return wanting(ones({10, 10})); }
Tensor sum_of_two() { return add(sum(wanting(ones({10, 10}))), sum(wanting(ones({10, 10})))); }
std::vector<int64_t> running_here() {
  const Contexts::Counts counts = static_cast<Contexts&>(here()).counts();
  return {static_cast<int64_t>(counts.contexts), static_cast<int64_t>(counts.backwards)};
}

const std::vector<Served> kServes{remote<through>,     remote<plus_ref>,     remote<kept_on>,
                                  remote<weight_here>, remote<slow_weight>,  remote<number_here>,
                                  remote<sum_of_two>,  remote<running_here>, remote<wanting_ones>};

class AutogradPrograms : public BothModes {
 protected:
  static AgentOptions options() { return BothModes::options(kServes); }
};
INSTANTIATE_TEST_SUITE_P(Rpc, AutogradPrograms, kBothModes, name_of_mode);

// spec: test_async_dist_autograd
TEST_P(AutogradPrograms, ManyThreadsAtOneWorkerAllFinish) {
  for (const bool grows : {true, false}) {
    AgentOptions own = options();
    if (!grows) own.most_threads = own.threads;
    run_agents(4, own, [](Agent& agent, comm::Group& group) {
      if (group.rank() == 0) return;
      std::vector<std::thread> threads;
      threads.reserve(20);
      for (int t = 0; t < 20; ++t) {
        threads.emplace_back([&, t] {
          const Tensor x = wanting(pattern({3, 3}, t)), y = wanting(pattern({3, 3}, t + 1));
          Context context(agent);
          const Tensor a = agent.call<product>(0, x, y), b = agent.call<times>(0, x, y),
                       c = agent.call<product>(0, a, b), d = agent.call<times>(0, a, b);
          context.backward({sum(agent.call<plus>(0, c, d))});
          const Tensor lx = wanting(x), ly = wanting(y);
          const Tensor la = matmul(lx, ly), lb = mul(lx, ly);
          backward(sum(add(matmul(la, lb), mul(la, lb))));
          expect_near(context.gradient(x), gradient(lx));
          expect_near(context.gradient(y), gradient(ly));
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// spec: test_clean_context_during_backward
TEST_P(AutogradPrograms, AContextMayBeReleasedDuringItsBackward) {
  struct Releases final : Function {
    Releases(Contexts& whose, uint64_t which) : contexts(whose), id(which) {}
    Contexts& contexts;
    uint64_t id;
    const char* name() const override { return "releases"; }
    std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
    std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
      contexts.close(id);
      return {dout[0]};
    }
  };
  for (const bool grows : {true, false}) {
    AgentOptions own = options();
    if (!grows) own.most_threads = own.threads;
    run_agents(4, own, [](Agent& agent, comm::Group&) {
      Contexts& contexts = agent;
      const Tensor x = wanting(pattern({3, 3}, 1));
      Context context(agent);
      Tensor y = x;
      for (int i = 0; i < 100; ++i) {
        if (i == 50) y = apply<Releases>({y}, contexts, context.id())[0];
        y = agent.call<plus>(next(agent), y, pattern({3, 3}, i));
      }
      EXPECT_EQ(contexts.get(context.id())->sends.size(), 100u);
      try {
        context.backward({sum(y)});
      } catch (const RpcError&) {  // it may throw; the agents go on
      }
      EXPECT_EQ(agent.call<plus>(next(agent), ones({1}), ones({1})).to_vector<float>(), std::vector<float>{2});
    });
  }
}

// spec: test_thread_local_context_id
TEST_P(AutogradPrograms, AFetchInAContextCarriesItToTheOwnersOtherThread) {
  run_agents(4, options(), [](Agent& agent, comm::Group&) {
    const RRef<Tensor> slow = agent.remote<slow_weight>(next(agent), 100);
    Context context(agent);  // opened after the call
    context.backward({sum(mul(slow.to_here(), 3))});
    const auto there = agent.call<gradients_here>(next(agent), context.id());
    ASSERT_EQ(there.size(), 1u);
    EXPECT_EQ(there[0].second.to_vector<float>(), std::vector<float>(4, 3));
  });
}

// spec: test_post_hooks
TEST_P(AutogradPrograms, HooksBehindAccumulationRunOnce) {
  run_agents(4, options(), [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(ones({3, 3})), y = wanting(ones({3, 3}));
    int counter = 0;
    after_accumulate(x, [&](const Tensor&) { counter += 1; });
    after_accumulate(x, [&](const Tensor&) { counter += 2; });
    after_accumulate(y, [&](const Tensor&) { counter += 2; });
    Context context(agent);
    context.backward({sum(add(agent.call<plus>(next(agent), x, y), agent.call<times>(next(agent), x, y)))});
    EXPECT_EQ(counter, 5);
  });
}

// spec: DistAutogradTest.test_debug_info
TEST_P(AutogradPrograms, RunningBackwardsAreCounted) {
  std::atomic<int> most{0};
  run_agents(4, options(), [&](Agent& agent, comm::Group&) {
    Contexts& contexts = agent;
    {
      const Tensor x = wanting(ones({3, 3}));
      Context context(agent);
      on_gradient(x, [&](const Tensor&) {
        const int running = static_cast<int>(contexts.counts().backwards);
        EXPECT_GE(running, 1);
        EXPECT_LE(running, 4);
        most = std::max(most.load(), running);
        return Tensor();
      });
      Tensor y = x;
      for (int step = 1; step < 4; ++step) y = agent.call<plus>(next(agent, step), y, x);
      context.backward({sum(y)});
      EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(9, 4));
    }
    agent.barrier();
    expect_soon("no context is left", [&] { return contexts.counts().contexts == 0; });
    EXPECT_EQ(agent.autograd_info(), (Agent::Numbers{{"autograd.contexts", 0}, {"autograd.backwards", 0}}));
  });
  EXPECT_GE(most, 1);
}

// spec: test_owner_rref_backward, test_user_rref_backward
TEST_P(AutogradPrograms, BackwardMayBeginAtAReference) {
  run_agents(4, options(), [](Agent& agent, comm::Group& group) {
    const Tensor x = wanting(ones({10, 10})), y = wanting(ones({10, 10}));
    const auto loss = [&] { return add(sum(add(x, y)), sum(add(x, y))); };
    const RRef<Tensor> own = agent.reference(loss());
    backward(own, 0, true);
    EXPECT_EQ(gradient(x).to_vector<float>(), std::vector<float>(100, 2));
    {
      Context context(agent);
      backward(own, context.id(), true);
      EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(100, 2));
      backward(own, context.id());
      EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(100, 4));
    }
    const auto text = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_THAT(text([&] { backward(agent.reference(ones({1})), 0); }), HasSubstr("does not require a gradient"));
    EXPECT_THAT(text([&] { backward(agent.reference(add(x, y)), 0); }), HasSubstr("[10, 10]"));
    EXPECT_THAT(text([&] { backward(agent.reference(loss()), 100); }), HasSubstr("context 100"));
    EXPECT_THAT(text([&] { backward(agent.reference<int64_t>(3), 0); }), HasSubstr("not a tensor"));
    // The reference is made by another worker.
    const RRef<Tensor> there = agent.remote<sum_of_two>(next(agent));
    {
      Context context(agent);
      agent.call<number_here>(next(agent));  // the owner learns of the context
      backward(there, context.id(), true);
      backward(there, context.id());
      const auto gradients = agent.call<gradients_here>(next(agent), context.id());
      ASSERT_EQ(gradients.size(), 2u);
      EXPECT_EQ(gradients[0].second.to_vector<float>(), std::vector<float>(100, 2));
    }
    EXPECT_THAT(text([&] { backward(there, 0); }), HasSubstr("context"));
    Context context(agent);
    EXPECT_THAT(text([&] { backward(agent.remote<number_here>(next(agent)), context.id()); }),
                HasSubstr("not a tensor"));
    static_cast<void>(group);
  });
}

// ---- data-parallel modules

struct Net : nn::Module {
  nn::Linear fc{2, 3};
  CHORALE_MODULE(Net, fc)
  Tensor forward(const Tensor& x) { return fc(x); }
};

// spec: test_ddp_comparison
TEST_P(AutogradPrograms, DdpAveragesInAContextAsItDoesOutside) {
  run_agents(4, options(), [](Agent& agent, comm::Group& group) {
    DistributedDataParallel ddp(Net(), group);
    const Tensor x = pattern({3, 2}, group.rank());
    const auto loss = [&] { return sqrt(sum(square(ddp(x)))); };
    Context context(agent);
    context.backward({loss()});
    const auto distributed = context.gradients();
    ddp.zero_grad();
    backward(loss());
    const auto parameters = ddp.module().parameters();
    ASSERT_EQ(distributed.size(), parameters.size());
    for (const Tensor& parameter : parameters) expect_near(context.gradient(parameter), gradient(parameter));
    agent.barrier();
  });
}

// spec: test_ddp_comparison_uneven_inputs
TEST_P(AutogradPrograms, DdpAveragesUnevenInputsInAContext) {
  run_agents(4, options(), [](Agent& agent, comm::Group& group) {
    DistributedDataParallel ddp(Net(), group);
    parallel::join({&ddp}, {}, [&] {
      for (int i = 0; i < (group.rank() % 2 == 0 ? 3 : 1); ++i) {
        const Tensor x = pattern({3, 2}, 10 * i + group.rank());
        Context context(agent);
        context.backward({sqrt(sum(square(ddp(x))))});
        ddp.zero_grad();
        backward(sqrt(sum(square(ddp(x)))));
        for (const Tensor& parameter : ddp.module().parameters())
          expect_near(context.gradient(parameter), gradient(parameter));
      }
    });
    agent.barrier();
  });
}

// ---- workers that end

// spec: test_backward_node_failure
TEST_P(AutogradPrograms, BackwardFailsWhenAWorkerIsGone) {
  AgentOptions own = options();
  const std::vector<int> ends = run_agent_processes(4, own, [](Agent& agent, comm::Group& group) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    const Tensor z = agent.call<plus>(next(agent), x, y);
    agent.barrier();
    if (group.rank() % 2 == 1) raise(SIGKILL);
    // The worker serves until it is gone.
    text_of(Kind::kConnection, group.rank() + 1, [&] {
      while (true) agent.call<number_here>(next(agent));
    });
    try {
      context.backward({sum(z)});
      ADD_FAILURE() << "no error";
    } catch (const RpcError& error) {
      EXPECT_EQ(error.kind(), Kind::kConnection) << error.what();
      EXPECT_EQ(error.worker(), group.rank() + 1);
    }
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0, -SIGKILL}));
}

// ---- random programs

// Makes a value of earlier ones by calls on other workers, or by the same functions here.
Tensor run_program(Agent* agent, unsigned seed, std::vector<Tensor> values) {
  std::mt19937 random(seed);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  for (int step = 0; step < 8; ++step) {
    const Tensor a = values[pick(values.size())], b = values[pick(values.size())];
    const auto kind = pick(6), to = pick(4), other = pick(4);
    const bool dropped = pick(5) == 0;
    Tensor made;
    if (!agent) {
      made = kind == 0 || kind == 4 || kind == 5 ? add(a, b) : mul(a, b);
    } else if (kind == 0) {
      made = agent->call<plus>(to, a, b);
    } else if (kind == 1) {
      made = agent->call<through>(to, a, b, static_cast<int64_t>(other));
    } else if (kind == 2) {
      made = agent->remote<times>(to, a, b).to_here();
    } else if (kind == 3) {
      made = agent->call_async<times>(to, a, b).wait();
    } else if (kind == 4) {
      made = agent->call<kept_on>(to, a, b, static_cast<int64_t>(other)).to_here();
    } else {
      const RRef<Tensor> left = agent->reference(a);
      made = agent->call<plus_ref>(to, left, b);
    }
    if (!dropped) values.push_back(made);
  }
  return sum(values.back());
}

void check_random_programs(const AgentOptions& options) {
  const auto seeds = static_cast<unsigned>(seeds_to_try(200, 5000));
  run_agents(4, options, [&](Agent& agent, comm::Group& group) {
    for (auto seed = static_cast<unsigned>(group.rank()); seed < seeds; seed += 4) {
      const std::vector<Tensor> start{pattern({2, 2}, seed), pattern({2, 2}, seed + 1), pattern({2, 2}, seed + 2)};
      std::vector<Tensor> here{wanting(start[0]), wanting(start[1]), start[2]},
          far{wanting(start[0]), wanting(start[1]), start[2]};
      const Tensor expected = run_program(nullptr, seed, here);
      Context context(agent);
      const Tensor loss = run_program(&agent, seed, far);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-3 * (1 + std::abs(expected.item<double>()))) << seed;
      if (!requires_grad(expected)) {
        EXPECT_FALSE(requires_grad(loss)) << seed;
        continue;
      }
      backward(expected);
      context.backward({loss});
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_EQ(context.gradient(far[i]).defined(), gradient(here[i]).defined()) << "seed " << seed;
        if (gradient(here[i]).defined())
          expect_near(context.gradient(far[i]), gradient(here[i]), concat("seed ", seed));
      }
    }
    agent.barrier();
    expect_soon("no reference and no context is left", [&] {
      const ReferenceCounts left = agent.debug().references;
      return left.owners + left.forks + left.pending_users + left.pending_children == 0 &&
             static_cast<Contexts&>(agent).counts().contexts == 0;
    });
    agent.barrier();
  });
}

TEST(RandomPrograms, GiveTheGradientsOfOneWorker) { check_random_programs(for_context_tests(kServes)); }

// Messages overtake each other; control messages fail and come twice.
TEST(RandomPrograms, GiveTheGradientsOfOneWorkerInAnyOrderOfMessages) {
  AgentOptions options = for_context_tests(kServes);
  options.faults = Faults::chaos(1);
  check_random_programs(options);
}

// Sparse tensors, in every way of calling.
Tensor same(const Tensor& x) { return x; }
Tensor same_of(const RRef<Tensor>& x) { return x.to_here(); }
std::vector<Tensor> same_list(const std::vector<Tensor>& x) { return x; }
Tensor same_nested(const Tensor& x, int64_t worker) { return here().call<same>(worker, x); }

// spec: test_send_to_rank_sparse, test_multi_rpc_sparse, test_nested_rpc_sparse, test_py_sparse_tensors_in_container
// spec: test_builtin_remote_self_sparse, test_multi_py_udf_remote_sparse, test_self_py_udf_remote_sparse
// spec: test_self_remote_rref_as_rpc_arg_sparse, test_self_remote_rref_as_self_rpc_arg_sparse
// spec: test_self_remote_rref_as_remote_arg_sparse, test_self_remote_rref_as_self_remote_arg_sparse
// spec: test_py_rref_args_sparse, test_nested_remote_sparse
TEST(SparseTensors, TravelInEveryWay) {
  run_agents(4, for_tests({remote<same>, remote<same_of>, remote<same_list>, remote<same_nested>}),
             [](Agent& agent, comm::Group& group) {
               for (const bool coalesced : {false, true}) {
                 const Tensor example = sparse_example();
                 const Tensor x = Tensor::sparse_coo(example.sparse().indices,
                                                     mul(example.sparse().values, group.rank() + 1), {3, 3}, coalesced);
                 const auto check = [&](const Tensor& y) {
                   ASSERT_TRUE(y.is_sparse());
                   EXPECT_EQ(y.sparse().coalesced, coalesced);
                   EXPECT_EQ(to_dense(y).to_vector<float>(), to_dense(x).to_vector<float>());
                 };
                 for (const int to : {(group.rank() + 1) % 4, group.rank()}) {
                   check(agent.call<same>(to, x));
                   check(agent.call_async<same>(to, x).wait());
                   const RRef<Tensor> there = agent.remote<same>(to, x);
                   check(there.to_here());
                   check(agent.call<same_list>(to, std::vector{x, x})[1]);
                   check(agent.call<same_nested>(to, x, (group.rank() + 2) % 4));
                   for (const int third : {(group.rank() + 2) % 4, to}) {
                     check(agent.call<same_of>(third, there));
                     check(agent.remote<same_of>(third, there).to_here());
                   }
                   std::vector<Future<Tensor>> many;
                   many.reserve(10);
                   for (int i = 0; i < 10; ++i) many.push_back(agent.call_async<same>(to, x));
                   for (const auto& one : many) check(one.wait());
                 }
               }
             });
}

}  // namespace
}  // namespace chorale::rpc
