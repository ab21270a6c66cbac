// What must hold when things go wrong: too few threads, messages that overtake each other, workers that die in the
// middle of something.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <latch>
#include <thread>

#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::plus;

int64_t deep(int64_t depth) {
  if (depth == 0) return 0;
  Agent agent = here();
  return 1 + agent.call<deep>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), depth - 1);
}
// Both branches of a tree, one after the other and one beside the other.
int64_t tree(int64_t depth) {
  if (depth == 0) return 1;
  Agent agent = here();
  const auto count = static_cast<int64_t>(agent.workers().size());
  const Future<int64_t> beside = agent.call_async<tree>((agent.info().id + 1) % count, depth - 1);
  const int64_t then = agent.call<tree>((agent.info().id + 2) % count, depth - 1);
  return beside.wait() + then;
}
// Its gradient ends the process.
struct Dies final : Function {
  const char* name() const override { return "dies"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override {
    raise(SIGKILL);
    return {};
  }
};
Tensor dies_in_backward(const Tensor& x) { return apply<Dies>({x})[0]; }
Tensor through_a_worker_that_dies(const Tensor& x, int64_t worker) {
  return mul(here().call<dies_in_backward>(worker, x), 2);
}
void ends_process() { raise(SIGKILL); }
Tensor ones_here() { return ones({2}); }

// Functions that wait for others, and how many of them have begun.
std::atomic<std::latch*> gate{nullptr};
std::atomic<int> begun{0};
int64_t waits_at_gate() {
  gate.load()->wait();
  return 1;
}
int64_t through_a_gate(int64_t worker) {
  ++begun;
  return here().call<waits_at_gate>(To(worker).within(0s));
}
int64_t value_here(const RRef<int64_t>& x) {
  ++begun;
  return x.local_value();
}
int64_t waits_for_all() {
  ++begun;
  here().barrier();
  return 1;
}

const std::vector<Served> kServes{
    remote<waits_at_gate>, remote<through_a_gate>, remote<value_here>,       remote<waits_for_all>,
    remote<deep>,          remote<tree>,           remote<dies_in_backward>, remote<through_a_worker_that_dies>,
    remote<ends_process>,  remote<ones_here>};

AgentOptions with_threads(int threads) {
  AgentOptions options = for_context_tests(kServes);
  options.threads = options.most_threads = threads;
  return options;
}

// ---- too few threads

TEST(FewThreads, NestedCallsDoNotStarve) {
  for (const int threads : {1, 2, 5}) {
    run_agents(4, with_threads(threads), [](Agent& agent, comm::Group& group) {
      if (group.rank() > 0) return;
      EXPECT_EQ(agent.call<deep>(next(agent), 100), 100);
      EXPECT_LE(agent.debug().threads, agent.debug().threads_configured);
    });
  }
}

TEST(FewThreads, TreesOfCallsDoNotStarve) {
  run_agents(3, with_threads(1), [](Agent& agent, comm::Group& group) {
    if (group.rank() > 0) return;
    EXPECT_EQ(agent.call<tree>(next(agent), 6), 64);
  });
}

TEST(FewThreads, AreConfigured) {
  run_agents(2, with_threads(3), [](Agent& agent, comm::Group&) {
    agent.call<deep>(next(agent), 30);
    EXPECT_EQ(agent.debug().threads_configured, 3);
    EXPECT_LE(agent.debug().threads, 3);
  });
}

// ---- shutdown

// Their callers may be gone, and their answers never come.
TEST(ShutdownNow, EndsWhatServedFunctionsWaitFor) {
  std::latch opens(1);
  gate = &opens;
  begun = 0;
  comm::run_ranks(3, [&](comm::Group& group) {
    Agent agent(group, for_context_tests(kServes));
    if (group.rank() == 0) {
      const RRef<int64_t> later = agent.remote<through_a_gate>(1, 2);
      const std::vector<Future<int64_t>> calls{agent.call_async<through_a_gate>(1, 2), later.to_here_async(),
                                               agent.call_async<value_here>(1, later),
                                               agent.call_async<waits_for_all>(1)};
      Context context(agent);
      std::thread backwards([&] { EXPECT_THROW(backward(later, context.id()), RpcError); });
      for (const auto& call : calls) EXPECT_THROW(call.wait(), RpcError);
      backwards.join();
    } else if (group.rank() == 1) {
      expect_soon("all of them wait", [&] { return begun == 4 && agent.debug().served_later >= 2; });
      agent.shutdown_now();
    }
    group.barrier().wait();
    if (group.rank() == 2) opens.count_down();
    agent.shutdown_now();
  });
}

// ---- workers that die

class DeathsInBackward : public BothModes {};
INSTANTIATE_TEST_SUITE_P(Rpc, DeathsInBackward, kBothModes, name_of_mode);

TEST_P(DeathsInBackward, AreNamedWhereItBegan) {
  const std::vector<int> ends = run_agent_processes(3, options(kServes), [](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      const Tensor x = wanting(pattern({3, 3}, 1));
      Context context(agent);
      const Tensor y = agent.call<through_a_worker_that_dies>(1, x, 2);
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(text_of(Kind::kConnection, 2, [&] { context.backward({sum(y)}); }), HasSubstr("'worker2'"));
      EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    }
    if (group.rank() == 0) {  // the worker that is left goes on
      const Tensor x = wanting(pattern({3, 3}, 2));
      Context context(agent);
      context.backward({sum(agent.call<plus>(1, x, x))});
      EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(9, 2));
    }
    if (group.rank() == 2) std::this_thread::sleep_for(60s);
    agent.barrier({"worker0", "worker1"});
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0, -SIGKILL}));
}

// Which worker dies (the first of the names leads), and whether the others know of it before they shut down.
class DeathsInShutdown : public testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Rpc, DeathsInShutdown, testing::Combine(testing::Values(0, 1, 2), testing::Bool()),
                         [](const auto& row) {
                           return concat("Worker", std::get<0>(row.param), std::get<1>(row.param) ? "Known" : "");
                         });

TEST_P(DeathsInShutdown, AreNamedByAllOthers) {
  const int dead = std::get<0>(GetParam());
  const bool known = std::get<1>(GetParam());
  const std::vector<int> ends =
      run_agent_processes(3, for_context_tests(kServes), [&](Agent& agent, comm::Group& group) {
        agent.barrier();
        if (group.rank() == dead) {
          // Either at once, or likely when the others wait in shutdown.
          if (!known) std::this_thread::sleep_for(100ms);
          raise(SIGKILL);
        }
        if (known) {
          text_of(Kind::kConnection, dead, [&] {
            while (true) agent.call<ones_here>(dead);
          });
        }
        EXPECT_THAT(text_of(Kind::kConnection, dead, [&] { agent.shutdown(); }),
                    HasSubstr(concat("'worker", dead, "'")));
        EXPECT_FALSE(agent.is_running());
      });
  std::vector<int> expected(3, 0);
  expected[static_cast<size_t>(dead)] = -SIGKILL;
  EXPECT_EQ(ends, expected);
}

TEST(Deaths, OfAnOwnerFailReferencesToItsValues) {
  const std::vector<int> ends =
      run_agent_processes(3, for_context_tests(kServes), [](Agent& agent, comm::Group& group) {
        if (group.rank() == 0) {
          const RRef<Tensor> there = agent.remote<ones_here>(1);
          there.to_here();
          text_of(Kind::kConnection, 1, [&] { agent.call<ends_process>(1); });
          EXPECT_THAT(text_of(Kind::kConnection, 1, [&] { there.to_here(); }), HasSubstr("'worker1'"));
          EXPECT_EQ(agent.call<plus>(2, ones({1}), ones({1})).to_vector<float>(), std::vector<float>{2});
        }
        if (group.rank() == 1) std::this_thread::sleep_for(60s);
        agent.barrier({"worker0", "worker2"});
        agent.shutdown_now();
      });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace chorale::rpc
