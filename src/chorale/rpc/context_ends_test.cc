// Contexts that end while calls are in flight, and those of workers that die: no worker keeps one (Note [Ends of
// contexts] in dist_autograd/contexts.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <latch>
#include <thread>

#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Contexts;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::plus;

std::atomic<std::latch*> gate{nullptr};
Tensor waits_at_gate(const Tensor& x) {
  gate.load()->wait();
  return mul(x, 2);
}
Tensor throws(const Tensor&) { throw StateError("on purpose"); }
Tensor through(const Tensor& x, int64_t worker) { return mul(here().call<plus>(worker, x, x), 2); }
std::atomic<int> arrived{0};
Tensor arrives(const Tensor& x) {
  ++arrived;
  return mul(x, 2);
}
Tensor leaves_a_call_behind(const Tensor& x, int64_t worker) {
  here().call_async<arrives>(worker, x);
  return mul(x, 2);
}

const std::vector<Served> kServes{remote<waits_at_gate>, remote<throws>, remote<through>, remote<arrives>,
                                  remote<leaves_a_call_behind>};

Tensor input() { return wanting(pattern({3, 3}, 1)); }
size_t contexts_of(const Agent& agent) { return static_cast<Contexts&>(agent).counts().contexts; }

class EndsOfContexts : public BothModes {};
INSTANTIATE_TEST_SUITE_P(Rpc, EndsOfContexts, kBothModes, name_of_mode);

TEST_P(EndsOfContexts, AreNotUndoneByAnAnswer) {
  std::latch opens(1);
  gate = &opens;
  run_agents(2, options(kServes), [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 1) return;
    uint64_t id = 0;
    Future<Tensor> later;
    {
      Context context(agent);
      id = context.id();
      later = agent.call_async<waits_at_gate>(1, input());
    }
    opens.count_down();
    const Tensor y = later.wait();
    EXPECT_EQ(y.to_vector<float>(), mul(pattern({3, 3}, 1), 2).to_vector<float>());
    EXPECT_EQ(contexts_of(agent), 0u);
    EXPECT_THAT(text_of(Kind::kDeadContext, [&] { backward(sum(y)); }), HasSubstr("has ended"));
    expect_soon("the callee forgets it, too", [&] { return !agent.call<knows_context>(1, id); });
  });
}

// The word of the end must not come before the call.
TEST_P(EndsOfContexts, WaitForCallsThatAreLate) {
  AgentOptions late = options(kServes);
  late.faults.delay = {{MessageKind::kCall, 20ms}, {MessageKind::kFetch, 20ms}};
  run_agents(2, late, [](Agent& agent, comm::Group& group) {
    if (group.rank() == 1) return;
    const RRef<Tensor> there = agent.remote<plus>(1, pattern({3, 3}, 1), pattern({3, 3}, 2));
    const auto ends_with = [&](const std::function<std::function<void()>()>& begin) {
      uint64_t id = 0;
      std::function<void()> waits;
      {
        Context context(agent);
        id = context.id();
        waits = begin();
      }
      waits();
      EXPECT_EQ(contexts_of(agent), 0u);
      expect_soon("the callee forgets it", [&] { return !agent.call<knows_context>(1, id); });
    };
    ends_with([&] {
      const auto answer = agent.call_async<plus>(1, input(), input());
      return [answer] { answer.wait(); };
    });
    ends_with([&] {
      const auto answer = agent.call_async<throws>(1, input());
      return [answer] { text_of(Kind::kRemote, [&] { answer.wait(); }); };
    });
    ends_with([&] {
      const auto answer = there.to_here_async();
      return [answer] { answer.wait(); };
    });
    ends_with([&] {
      const auto answer = agent.call_async<plus>(To(1).within(1ms), input(), input());
      return [answer] { text_of(Kind::kTimeout, [&] { answer.wait(); }); };
    });
  });
}

// Workers wait, and not only where the context was opened.
TEST_P(EndsOfContexts, WaitForCallsThatCalleesLeftBehind) {
  arrived = 0;
  comm::run_ranks(3, [&](comm::Group& group) {
    AgentOptions own = options(kServes);
    if (group.rank() == 1) own.faults.delay = {{MessageKind::kCall, 50ms}};
    Agent agent(group, own);
    if (group.rank() == 0) {
      const Context context(agent);
      agent.call<leaves_a_call_behind>(1, input(), 2);
    }
    expect_soon("the last call comes", [] { return arrived == 1; });
    agent.barrier();
    expect_soon("nobody has a context", [&] { return contexts_of(agent) == 0; });
    agent.barrier();
    EXPECT_EQ(contexts_of(agent), 0u);
    agent.shutdown();
  });
}

// The dead worker would have said it to those that it had called.
TEST_P(EndsOfContexts, ComeWithTheDeathOfTheOnlyCaller) {
  const std::vector<int> ends = run_agent_processes(3, options(kServes), [](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      const Context context(agent);
      agent.call<through>(1, input(), 2);
      agent.barrier();
      agent.barrier();
      agent.barrier({"worker0", "worker2"});
      agent.call<plus>(2, input(), input());
      EXPECT_TRUE(agent.call<knows_context>(2, context.id()));  // it may be called in it again
    } else {
      agent.barrier();
      EXPECT_EQ(contexts_of(agent), 1u);
      agent.barrier();  // all have looked
      if (group.rank() == 1) raise(SIGKILL);
      expect_soon("the worker behind it forgets it", [&] { return contexts_of(agent) == 0; });
      agent.barrier({"worker0", "worker2"});
    }
    agent.barrier({"worker0", "worker2"});
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0}));
}

// Requests of a dead worker may come after the word of its death.
TEST(EndsOfTheDead, AreForGood) {
  struct Nobody final : dist_autograd::Courier {
    void send(int, dist_autograd::Gradients, Done) override {}
    void send(int, dist_autograd::Marks, Marked) override {}
    void send(int, dist_autograd::Notice) override {}
    std::unique_ptr<dist_autograd::Latch> make_latch() override { return nullptr; }
  } nobody;
  Contexts contexts(0, nobody, dist_autograd::Mode::kSmart);
  const auto comes = [&](uint64_t number) {
    contexts.received({uint64_t{1} << 48 | number, 0}, 1, {}, Contexts::Came::kRequest);
    return contexts.counts().contexts;
  };
  EXPECT_EQ(comes(7), 1u);
  contexts.forget_worker(1, 9);
  EXPECT_EQ(contexts.counts().contexts, 0u);
  EXPECT_EQ(comes(8), 0u);
  EXPECT_EQ(comes(10), 1u);  // of another worker that came under the same number
  contexts.forget_worker(1);
  EXPECT_EQ(comes(11), 0u);
}

}  // namespace
}  // namespace chorale::rpc
