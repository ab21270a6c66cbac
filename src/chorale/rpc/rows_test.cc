// Rows of spec/rpc-and-distributed-autograd.md that need more than one part at once: agents that are made twice, what
// an agent says of itself, sparse tensors in every kind of call, functions that finish later by every kind of call,
// chains of references, learning from observers, tables whose gradients are sparse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <random>

#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Mode;
using parallel::DistributedDataParallel;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::add_ints;
using served::by_hand;
using served::chained;
using served::fan_out;
using served::nested;

// ---- agents

// spec: test_reinit, test_init_rpc_twice
TEST(Rows, AGroupHasOneAgentAtATime) {
  comm::run_ranks(4, [](comm::Group& group) {
    const AgentOptions options = for_tests({remote<add_ints>});
    for (int64_t round = 0; round < 3; ++round) {
      Agent agent(group, options);
      EXPECT_THAT(text_of(Kind::kAlreadyRunning, [&] { Agent(group, options); }), HasSubstr("shut that one down"));
      EXPECT_EQ(agent.call<add_ints>(next(agent), round, 2), round + 2);
      agent.shutdown();
    }
  });
}

// spec: RpcTest.test_debug_info
TEST(Rows, WhatAnAgentSaysOfItselfIsTheUnionOfItsParts) {
  run_agents(4, for_tests({remote<add_ints>}), [](Agent& agent, comm::Group&) {
    const auto all = agent.debug_info();
    size_t sum = 0;
    for (const auto& part : {agent.crew_info(), agent.reference_info(), agent.autograd_info()}) {
      EXPECT_FALSE(part.empty());
      sum += part.size();
      for (const auto& [key, value] : part) EXPECT_TRUE(all.contains(key)) << key;
    }
    EXPECT_EQ(sum, all.size());  // so no key is in two of them
    EXPECT_EQ(all.at("agent.threads_configured"), 16);
  });
}

// ---- futures: what is no function of one does not compile

template <class F>
concept Continues = requires(Future<int64_t> future, F f) {
  future.then(f);
};
// spec: test_callback_wrong_arg_num, test_callback_wrong_arg_type
TEST(Rows, AContinuationTakesTheFuture) {
  const auto right = [](const Future<int64_t>& done) { return done.wait(); };
  const auto too_many = [](const Future<int64_t>&, int64_t) {};
  const auto none = [] {};
  const auto of_another = [](const Future<std::string>&) {};
  static_assert(Continues<decltype(right)>);
  static_assert(!Continues<decltype(too_many)> && !Continues<decltype(none)> && !Continues<decltype(of_another)>);
  EXPECT_EQ(ready<int64_t>(4).then(right).wait(), 4);
}

// ---- functions that finish later, by every kind of call

Future<int64_t> many_chained(int64_t steps) {
  Agent agent = here();
  Future<int64_t> sum = ready<int64_t>(0);
  for (int64_t i = 0; i < steps; ++i)
    sum = sum.then([agent, i](const Future<int64_t>& f) mutable {
      return agent.call_async<add_ints>(i % static_cast<int64_t>(agent.workers().size()), f.wait(), i);
    });
  return sum;
}
struct Later {
  explicit Later(int64_t start) : value(start) {}
  Future<int64_t> plus(int64_t x) { return here().call_async<add_ints>(caller(), value, x); }
  static Future<int64_t> twice(int64_t x) { return here().call_async<add_ints>(caller(), x, x); }
  int64_t value;
};

const std::vector<Served> kLater{remote<add_ints>,     remote<by_hand>,      remote<chained>,
                                 remote<nested>,       remote<many_chained>, remote<fan_out>,
                                 remote<&Later::plus>, remote<Later::twice>, remote<make<Later, int64_t>>};

template <auto F, class... Args>
void expect_by_every_call(Agent& agent, int64_t expected, const Args&... args) {
  EXPECT_EQ(agent.call<F>(next(agent), args...), expected);
  EXPECT_EQ(agent.call_async<F>(next(agent), args...).wait(), expected);
  EXPECT_EQ(agent.remote<F>(next(agent), args...).to_here(), expected);
}

// spec: test_async_function_{with_future_ctor,chained,nested}{,_remote}
// spec: test_async_function_multi_{chained,fanout}{,_async,_remote}
// spec: test_async_{class,static}_method{,_remote}, test_async_class_rref_proxy{,_async,_remote}
TEST(Rows, FunctionsThatFinishLaterDoSoByEveryKindOfCall) {
  run_agents(4, for_tests(kLater), [](Agent& agent, comm::Group&) {
    expect_by_every_call<by_hand>(agent, 8, 4);
    expect_by_every_call<chained>(agent, 12, 1);
    expect_by_every_call<nested>(agent, 13, 2);
    expect_by_every_call<many_chained>(agent, 190, 20);
    expect_by_every_call<fan_out>(agent, 190, 20);
    expect_by_every_call<Later::twice>(agent, 14, 7);
    const RRef<Later> object = agent.remote<make<Later, int64_t>>(next(agent), 30);
    EXPECT_EQ(agent.call<&Later::plus>(object, 3), 33);
    EXPECT_EQ(agent.call_async<&Later::plus>(object, 4).wait(), 34);
    EXPECT_EQ(agent.remote<&Later::plus>(object, 5).to_here(), 35);
  });
}

// A function whose type says that it finishes later cannot return anything but a future: that does not compile.
// spec: test_async_function_wrong_return_type{,_async,_remote}
TEST(Rows, AFunctionThatFinishesLaterReturnsAFuture) {
  static_assert(!std::is_convertible_v<int64_t, Future<int64_t>>);
  static_assert(!std::is_convertible_v<Future<std::string>, Future<int64_t>>);
  static_assert(!Sendable<Future<int64_t>>);
}

// ---- sparse tensors

Tensor sparse_of(int64_t n, double factor, bool coalesced) {
  std::vector<int64_t> places;
  for (int64_t i = 0; i < n; ++i) places.push_back(i);
  for (int64_t i = 0; i < n; ++i) places.push_back((7 * i + 3) % n);
  return Tensor::sparse_coo(Tensor::from(places, {2, n}), mul(pattern({n}, 1), factor), {n, n}, coalesced);
}
Tensor same(const Tensor& x) { return x; }
Tensor same_of(const RRef<Tensor>& x) { return x.to_here(); }
Tensor sum_of(const Tensor& a, const Tensor& b) { return sparse_add(a, b); }
Tensor sum_of_refs(const RRef<Tensor>& a, const RRef<Tensor>& b) { return sparse_add(a.to_here(), b.to_here()); }
Tensor nested_sum_of_refs(const RRef<Tensor>& a, const RRef<Tensor>& b, int64_t worker) {
  return here().call<sum_of_refs>(worker, a, b);
}
std::vector<RRef<Tensor>> refs_on(int64_t worker, const Tensor& x) {
  return {here().remote<same>(worker, x), here().remote<sum_of>(worker, x, x)};
}
void expect_same(const Tensor& got, const Tensor& expected) {
  ASSERT_TRUE(got.is_sparse());
  EXPECT_EQ(got.sparse().coalesced, expected.sparse().coalesced);
  EXPECT_EQ(to_dense(got).to_vector<float>(), to_dense(expected).to_vector<float>());
}
const std::vector<Served> kSparse{
    remote<same>, remote<same_of>, remote<sum_of>, remote<sum_of_refs>, remote<nested_sum_of_refs>, remote<refs_on>};

// spec: test_stress_heavy_rpc_sparse, test_wait_all_workers{,_twice}_sparse
// spec: test_builtin_remote_{ret,self}_sparse, test_multi_{builtin_remote_ret,py_udf_remote}_sparse
// spec: test_py_{rref_args,rref_args_user_share,rpc_rref_args}_sparse, test_nested_{remote,rref,rref_stress}_sparse
TEST(Rows, SparseTensorsTravelByEveryKindOfCallAndReference) {
  run_agents(4, for_tests(kSparse), [](Agent& agent, comm::Group& group) {
    const double factor = group.rank() + 1;
    std::vector<Future<Tensor>> heavy;
    heavy.reserve(20);
    for (int i = 0; i < 20; ++i)
      heavy.push_back(agent.call_async<same>(next(agent), sparse_of(100, factor + i, i % 2)));
    for (int i = 0; i < 20; ++i) expect_same(heavy[static_cast<size_t>(i)].wait(), sparse_of(100, factor + i, i % 2));
    agent.barrier();
    agent.barrier();
    if (group.rank() == 0) {  // the others wait for the end, and serve
      for (const int to : {1, 2})
        for (int i = 0; i < 30; ++i) expect_same(agent.call<same>(to, sparse_of(10, i, true)), sparse_of(10, i, true));
    }
    const Tensor x = sparse_of(3, factor, false), y = sparse_of(3, 2 * factor, false), sum = sparse_add(x, y);
    for (const int to : {(group.rank() + 1) % 4, group.rank()}) {
      std::vector<RRef<Tensor>> many;
      many.reserve(10);
      for (int i = 0; i < 10; ++i) many.push_back(agent.remote<same>(to, sparse_of(3, i, false)));
      for (int i = 0; i < 10; ++i) expect_same(many[static_cast<size_t>(i)].to_here(), sparse_of(3, i, false));
      const RRef<Tensor> a = agent.remote<same>(to, x), b = agent.remote<same>(to, y);
      expect_same(agent.remote<sum_of_refs>(to, a, b).to_here(), sum);
      expect_same(agent.call<sum_of_refs>(to, a, b), sum);
      expect_same(agent.remote<sum_of_refs>((to + 1) % 4, a, b).to_here(), sum);
      expect_same(agent.call<nested_sum_of_refs>((to + 2) % 4, a, b, to), sum);
      for (int i = 0; i < 20; ++i) {
        const auto refs = agent.remote<refs_on>(to, (to + 1) % 4, x).to_here();
        expect_same(refs[0].to_here(), x);
        expect_same(refs[1].to_here(), sparse_add(x, x));
      }
    }
  });
}

// spec: test_world_size_one_sparse
TEST(Rows, OneWorkerCallsItselfWithSparseTensors) {
  AgentOptions options = for_tests(kSparse);
  options.name = "me";
  run_agents(1, options, [](Agent& agent, comm::Group&) {
    for (const bool coalesced : {false, true}) {
      const Tensor x = sparse_of(4, 2, coalesced);
      expect_same(agent.call<same>("me", x), x);
      expect_same(agent.call_async<same>("me", x).wait(), x);
      expect_same(agent.remote<same>("me", x).to_here(), x);
    }
  });
}

// ---- references

// What a worker of the ring gives: the reference to what the next one gives, or at the end the one that went around.
struct Link {
  std::vector<RRef<Link>> next;
  std::vector<RRef<Tensor>> end;
  CHORALE_MESSAGE(Link, next, end)
};
Link forward_chain(int64_t ttl, const RRef<Tensor>& value) {
  if (ttl == 0) return {{}, {value}};
  Agent agent = here();
  const auto worker = (agent.info().id + 1) % static_cast<int64_t>(agent.workers().size());
  return {{agent.remote<forward_chain>(worker, ttl - 1, value)}, {}};
}
Tensor ones_plus(double x) { return add(ones({3, 3}), x); }

// spec: test_rref_forward_chain
TEST(Rows, AReferenceGoesAroundTheRing) {
  EXPECT_EQ(type_name<Link>(), "Link{list<rref<Link>>,list<rref<tensor>>}");
  run_agents(4, for_tests({remote<forward_chain>, remote<ones_plus>}), [](Agent& agent, comm::Group&) {
    constexpr int64_t kTtl = 8;
    const RRef<Tensor> value = agent.remote<ones_plus>(next(agent), 1);
    RRef<Link> link = agent.remote<forward_chain>(next(agent), kTtl, value);
    for (int64_t i = 0; i < kTtl; ++i) {
      const Link here = link.to_here();
      ASSERT_EQ(here.next.size(), 1u);
      ASSERT_TRUE(here.end.empty());
      link = here.next[0];
    }
    const Link last = link.to_here();
    ASSERT_EQ(last.end.size(), 1u);
    EXPECT_EQ(last.end[0].to_here().to_vector<float>(), std::vector<float>(9, 2));
  });
}

// ---- an agent that learns from observers

// Gets a reward when its action is the sign of what was seen.
struct Learner {
  Learner() : optimizer(weight(), {.lr = 0.5}) {}
  NamedTensors weight() { return {{"w", w}}; }
  int64_t select_action(int64_t observer, double seen) {
    const std::lock_guard lock(mutex);
    const Tensor p = sigmoid(mul(w, seen));
    const int64_t action = uniform({1}, 0, 1).item<double>() < p.item<double>() ? 1 : 0;
    logs[observer].push_back(log(action == 1 ? p : sub(ones({1}), p)));
    return action;
  }
  void report_reward(int64_t observer, double reward) {
    const std::lock_guard lock(mutex);
    rewards[observer].push_back(reward);
  }
  double finish_episode() {
    const std::lock_guard lock(mutex);
    Tensor loss = zeros({1});
    double total = 0;
    for (auto& [observer, list] : logs)
      for (size_t i = 0; i < list.size(); ++i) {
        const double reward = rewards[observer].at(i);
        loss = sub(loss, mul(list[i], reward - 0.5));
        total += reward;
      }
    optimizer.zero_grad();
    backward(sum(loss));
    optimizer.step();
    logs.clear();
    rewards.clear();
    return running = 0.05 * total + 0.95 * running;
  }
  nn::Parameter w{zeros({1})};
  optim::Sgd optimizer;
  std::mutex mutex;
  std::map<int64_t, std::vector<Tensor>> logs;
  std::map<int64_t, std::vector<double>> rewards;
  double running = 0;
};
Learner& learner() {
  static Learner one;
  return one;
}
int64_t select_action(int64_t observer, double seen) { return learner().select_action(observer, seen); }
void report_reward(int64_t observer, double reward) { learner().report_reward(observer, reward); }
void run_episode(int64_t steps) {
  Agent agent = here();
  const int64_t own = agent.info().id;
  for (int64_t i = 0; i < steps; ++i) {
    const double seen = std::sin(static_cast<double>(3 * i + own));
    const int64_t action = agent.call<select_action>(caller(), own, seen);
    agent.call<report_reward>(caller(), own, action == (seen > 0 ? 1 : 0) ? 1.0 : 0.0);
  }
}

// spec: test_rl_rpc
TEST(Rows, AnAgentLearnsFromItsObservers) {
  run_agents(4, for_tests({remote<select_action>, remote<report_reward>, remote<run_episode>}),
             [](Agent& agent, comm::Group& group) {
               if (group.rank() > 0) return;
               double running = 0;
               for (int episode = 0; episode < 10; ++episode) {
                 std::vector<Future<void>> episodes;
                 for (int observer = 1; observer < 4; ++observer)
                   episodes.push_back(agent.call_async<run_episode>(observer, 20));
                 wait_all(episodes);
                 running = learner().finish_episode();
               }
               EXPECT_GT(running, 0);
               EXPECT_GT(learner().w.item<double>(), 0);  // it has learnt that the sign counts
             });
}

// ---- tables with sparse gradients

// Sums of the rows in each bag, whose gradient has the rows that were used.
Tensor sparse_bag(const Tensor& ids, const Tensor& table, const Tensor& offsets, const Tensor& factors,
                  BagMode mode = BagMode::kSum) {
  const Tensor rows = embedding(ids, table, {}, true);
  return embedding_bag(arange(0, ids.elems(), 1, DType::kI64), rows, offsets, {.mode = mode, .weights = factors});
}
Tensor table_here(int64_t rows, int64_t columns) { return wanting(pattern({rows, columns}, 4)); }
Tensor bag_of(const RRef<Tensor>& table, const Tensor& ids, const Tensor& offsets, const Tensor& factors) {
  return sparse_bag(ids, table.local_value(), offsets, factors);
}

class SparseTables : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(Rpc, SparseTables, testing::Values(Mode::kSmart, Mode::kFast),
                         [](const auto& mode) { return mode.param == Mode::kSmart ? "Smart" : "Fast"; });

// spec: test_embedding_bag_with_no_grad_tensors
TEST_P(SparseTables, OnAnotherWorkerAddUpTheirSparseGradients) {
  std::vector<Served> serves{remote<table_here>, remote<bag_of>};
  serves.insert(serves.end(), context_functions().begin(), context_functions().end());
  AgentOptions options = for_tests(serves);
  options.backward = GetParam();
  run_agents(4, options, [](Agent& agent, comm::Group&) {
    const Tensor ids = Tensor::from<int64_t>({1, 2, 4, 5, 4, 3, 2, 9}, {8}),
                 offsets = Tensor::from<int64_t>({0, 4}, {2});
    const Tensor factors = wanting(pattern({8}, 2));
    const RRef<Tensor> table = agent.remote<table_here>(next(agent), 16, 16);
    const Tensor local = table_here(16, 16);
    const Tensor own = wanting(factors);
    backward(sum(sparse_bag(ids, local, offsets, own)));
    ASSERT_TRUE(gradient(local).is_sparse());
    Context context(agent);
    const Tensor loss = sum(agent.call<bag_of>(next(agent), table, ids, offsets, factors));
    context.backward({loss}, true);
    context.backward({loss});
    const auto there = agent.call<gradients_here>(next(agent), context.id());
    ASSERT_EQ(there.size(), 1u);
    EXPECT_TRUE(there[0].second.is_sparse());
    EXPECT_EQ(to_dense(there[0].second).to_vector<float>(), mul(to_dense(gradient(local)), 2).to_vector<float>());
    EXPECT_EQ(context.gradient(factors).to_vector<float>(), mul(gradient(own), 2).to_vector<float>());
  });
}

// Means of the rows in each bag of a table, whose gradient is sparse.
struct BagOfRows : nn::Module {
  nn::Embedding table{10, 3, {.sparse = true}};
  CHORALE_MODULE(BagOfRows, table)
  BagOfRows() { set_data(table.weight, pattern({10, 3}, 6)); }
  Tensor forward(const Tensor& ids, const Tensor& offsets) {
    return embedding_bag(arange(0, ids.elems(), 1, DType::kI64), table(ids), offsets, {.mode = BagMode::kMean});
  }
};

// spec: test_ddp_dist_autograd_sparse_grads
TEST_P(SparseTables, InDataParallelModulesHaveTheSameAveragesInAContext) {
  AgentOptions options = for_tests({});
  options.backward = GetParam();
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    DistributedDataParallel ddp(BagOfRows(), group);
    std::mt19937 random(static_cast<unsigned>(group.rank()));
    std::vector<int64_t> rows(10);
    for (int64_t& row : rows) row = static_cast<int64_t>(random() % 10);
    const Tensor ids = Tensor::from(rows, {10}), offsets = Tensor::from<int64_t>({0, 4}, {2});
    const auto loss = [&] { return sum(mul(ddp(ids, offsets), pattern({2, 3}, group.rank()))); };
    backward(loss());
    const Tensor table = ddp.module().table.weight, expected = gradient(table);
    ASSERT_TRUE(expected.is_sparse());
    const auto before = to_dense(expected).to_vector<float>();
    Context context(agent);
    context.backward({loss()});
    ASSERT_EQ(context.gradients().size(), 1u);
    ASSERT_TRUE(context.gradient(table).is_sparse());
    EXPECT_EQ(to_dense(context.gradient(table)).to_vector<float>(), before);
    EXPECT_EQ(to_dense(gradient(table)).to_vector<float>(), before);  // which stays as it was
    agent.barrier();
  });
}

// ---- a worker in the middle of a chain ends

Tensor plus_along(const Tensor& a, const Tensor& b, int64_t hops) {
  if (hops == 0) return add(a, b);
  Agent agent = here();
  return agent.call<plus_along>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), a, b, hops - 1);
}

// spec: test_backward_node_failure_python_udf
TEST_P(SparseTables, AChainWithAWorkerThatEndedFailsWhereItBegan) {
  AgentOptions options = for_tests({remote<plus_along>});
  options.backward = GetParam();
  const std::vector<int> ends = run_agent_processes(4, options, [](Agent& agent, comm::Group& group) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    if (group.rank() == 0) {
      Context context(agent);
      const Tensor z = agent.call<plus_along>(1, x, y, 3);
      agent.barrier();
      // The worker serves until it is gone.
      text_of(Kind::kConnection, 2, [&] {
        while (true) agent.call<plus_along>(2, ones({1}), ones({1}), 0);
      });
      text_of(Kind::kConnection, 2, [&] { context.backward({sum(z)}); });
      agent.barrier({"worker0", "worker1", "worker3"});
    } else {
      agent.barrier();
      if (group.rank() == 2) raise(SIGKILL);
      agent.barrier({"worker0", "worker1", "worker3"});  // they wait until worker 0 is done
    }
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace chorale::rpc
