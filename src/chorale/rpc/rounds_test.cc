// What a backward over several workers sends: Notes [Fast backward] and [Smart backward] in dist_autograd/contexts.h.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <thread>

#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using Kind = RpcErrorKind;
using served::plus;
using served::times;

// How many requests this worker has sent, and how many contexts it has.
std::pair<int64_t, int64_t> requests_and_contexts() {
  return {here().debug().requests, here().autograd_info().at("autograd.contexts")};
}

struct TakesLong final : Function {
  const char* name() const override { return "takes long"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    std::this_thread::sleep_for(30ms);
    return {dout[0]};
  }
};
Tensor slow_backward(const Tensor& x) { return apply<TakesLong>({x})[0]; }
Tensor through(int64_t worker, const Tensor& x) { return mul(here().call<slow_backward>(worker, x), 2); }
Tensor without_history(const Tensor& x) { return x.alias(); }
// Takes part in two ways, of which the second one leads nowhere.
Tensor drops_one(int64_t worker, const Tensor& x) {
  here().call<slow_backward>(worker, x);
  return mul(x, 2);
}
// Its own call is on its way when it answers.
std::atomic<Future<Tensor>*> left_behind{nullptr};
Tensor leaves_one(int64_t worker, const Tensor& x) {
  delete left_behind.exchange(new Future<Tensor>(here().call_async<slow_backward>(worker, x)));
  return mul(x, 2);
}
void wait_for_left() { left_behind.load()->wait(); }

const std::vector<Served> kServes{remote<requests_and_contexts>, remote<slow_backward>, remote<through>,
                                  remote<without_history>,       remote<drops_one>,     remote<leaves_one>,
                                  remote<wait_for_left>};

// What the four workers send while worker 0 does something in a context and the context ends.
std::vector<int64_t> sent_in(const AgentOptions& options, const std::function<void(Agent&, Context&)>& body) {
  std::vector<int64_t> sent;
  std::latch done(1);
  run_agents(4, options, [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      const auto asked = [&](int worker) {
        auto seen = agent.call<requests_and_contexts>(worker);
        while (seen.second > 0) seen = agent.call<requests_and_contexts>(worker);
        return seen.first;
      };
      for (int worker = 1; worker < 4; ++worker) sent.push_back(-asked(worker));
      const int64_t own = agent.debug().requests;
      {
        Context context(agent);
        body(agent, context);
      }
      sent.insert(sent.begin(), agent.debug().requests - own);
      for (int worker = 1; worker < 4; ++worker) sent[static_cast<size_t>(worker)] += asked(worker);
      done.count_down();
    }
    done.wait();  // a barrier would be a request, too
  });
  return sent;
}

class Rounds : public BothModes {
 protected:
  static AgentOptions served() { return options(kServes); }
};
INSTANTIATE_TEST_SUITE_P(Rpc, Rounds, kBothModes, name_of_mode);

std::vector<int64_t> by_worker(int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) { return {a, b, c, d}; }

// The gradients come back with the answer, and the end of the context is told once.
TEST_P(Rounds, AHopThereAndBackIsOne) {
  const auto sent = sent_in(served(), [](Agent& agent, Context& context) {
    const Tensor a = wanting(pattern({5, 6}, 1)), b = wanting(pattern({5, 6}, 2));
    context.backward({sum(agent.call<times>(1, a, b))});
    EXPECT_EQ(context.gradient(a).to_vector<float>(), b.to_vector<float>());
    EXPECT_EQ(context.gradient(b).to_vector<float>(), a.to_vector<float>());
  });
  EXPECT_EQ(sent, by_worker(3));  // the call, the gradients, the end of the context
}

// However long it takes.
TEST_P(Rounds, WorkersThatCallOthersAccountForThem) {
  const auto sent = sent_in(served(), [](Agent& agent, Context& context) {
    const Tensor x = wanting(pattern({4}, 1));
    context.backward({sum(agent.call<through>(1, 2, x))});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(4, 2));
  });
  EXPECT_EQ(sent, by_worker(3, 3));
}

TEST_P(Rounds, AReferenceIsAccountedForWhenItsValueIsFetched) {
  const auto sent = sent_in(served(), [](Agent& agent, Context& context) {
    const Tensor x = wanting(pattern({4}, 1));
    {
      const RRef<Tensor> there = agent.remote<slow_backward>(1, x);
      there.created().wait();  // else the value may be here before the worker has answered the call
      context.backward({sum(there.to_here())});
    }
    EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(4, 1));
  });
  EXPECT_EQ(sent, by_worker(5));  // the call, the fetch, the gradients, the end of the reference and of the context
}

// A result that nobody uses costs one message, and the worker that made it answers what follows from that.
TEST(SmartRounds, AResultThatNobodyUsesCostsAWord) {
  const auto sent = sent_in(for_context_tests(kServes), [](Agent& agent, Context& context) {
    const Tensor x = wanting(pattern({4}, 1)), y = wanting(pattern({4}, 2));
    agent.call<plus>(1, x, y);
    const Tensor dropped = agent.call<slow_backward>(2, x);
    context.backward({sum(agent.call<times>(1, x, y))});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
    // What was not used then can be used now.
    context.backward({sum(dropped)});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), add(y, 1).to_vector<float>());
  });
  // Three calls; a word to workers 1 and 2 and gradients to 1; gradients to 2 and a word to 1; the end at both.
  EXPECT_EQ(sent[0], 10);
  // Worker 1 hears of the two hops one after the other, so what it has to say of the first one may not wait; and while
  // that is not answered, what follows from the second one does not wait for the answer either.
  EXPECT_LE(sent[1], 2);
  EXPECT_EQ(sent[2] + sent[3], 0);
}

TEST(SmartRounds, AResultThatACalleeDropsCostsAWordThere) {
  const auto sent = sent_in(for_context_tests(kServes), [](Agent& agent, Context& context) {
    const Tensor x = wanting(pattern({4}, 1));
    context.backward({sum(agent.call<drops_one>(1, 2, x))});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(4, 2));
  });
  EXPECT_EQ(sent, by_worker(3, 3));
}

// A worker that received something and sent nothing afterwards would not take part: then it is asked first what will
// come.
TEST(SmartRounds, AWorkerThatGivesNothingBackIsNotWaitedFor) {
  for (const bool last : {false, true}) {
    const auto sent = sent_in(for_context_tests(kServes), [&](Agent& agent, Context& context) {
      const int64_t before = agent.debug().requests;
      const Tensor x = wanting(pattern({4}, 1)), y = wanting(pattern({4}, 2));
      const auto give_nothing_back = [&] { EXPECT_FALSE(requires_grad(agent.call<without_history>(1, x))); };
      if (!last) give_nothing_back();
      const Tensor z = agent.call<times>(1, x, y);
      if (last) give_nothing_back();
      context.backward({sum(z)});
      EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
      // The gradients may be back before the marks.
      if (last) expect_soon("marks are complete", [&] { return agent.debug().requests - before == 5; });
    });
    // Two calls, the gradients, the end of the context; marks there and back, and the word that they are complete.
    EXPECT_EQ(sent, last ? by_worker(6, 1) : by_worker(4));
  }
}

// A round is not waited for either whose part nobody knows: an answer did not come, or a call was on its way.
TEST(SmartRounds, CallsThatFailedOrWereLeftAreNotWaitedFor) {
  AgentOptions options = for_context_tests(kServes);
  options.faults.fail = {MessageKind::kOp};
  sent_in(options, [](Agent& agent, Context& context) {
    const Tensor x = wanting(pattern({4}, 1)), y = wanting(pattern({4}, 2));
    text_of(Kind::kInjected, [&] { agent.call_op(3, "add", {x, y}); });
    context.backward({sum(agent.call<times>(1, x, y))});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
    const Tensor left = agent.call<leaves_one>(1, 2, x);
    context.backward({sum(left)});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), add(y, 2).to_vector<float>());
    agent.call<wait_for_left>(1);
    context.backward({sum(agent.call<times>(3, x, y))});
  });
  delete left_behind.exchange(nullptr);
}

}  // namespace
}  // namespace chorale::rpc
