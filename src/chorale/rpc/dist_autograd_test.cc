// Distributed autograd (spec/rpc-and-distributed-autograd.md, B2), in both modes: what is recorded, and gradients. What
// backward does besides is in backward_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <future>
#include <thread>

#include "chorale/eager/sim_kernels.h"
#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Contexts;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Kind = RpcErrorKind;
using served::plus;
using served::product;
using served::times;

// ---- what workers serve

Tensor stacked(const std::vector<Tensor>& all) { return stack(all, 0); }
std::vector<Tensor> split_in_five(const Tensor& x) { return split(x, 2, 0); }
void nothing() {}
// a + b on the last of a ring of workers, handed from one to the next.
Tensor nested_plus(const Tensor& a, const Tensor& b, bool by_reference, int64_t hops) {
  Agent agent = here();
  if (hops == 0) return add(a, b);
  const auto worker = (agent.info().id + 1) % static_cast<int64_t>(agent.workers().size());
  if (by_reference) return agent.remote<nested_plus>(worker, a, b, by_reference, hops - 1).to_here();
  return agent.call<nested_plus>(worker, a, b, by_reference, hops - 1);
}
Tensor plus_on(const Tensor& a, const Tensor& b, int64_t worker, bool by_reference) {
  if (by_reference) return here().remote<plus>(worker, a, b).to_here();
  return here().call<plus>(worker, a, b);
}

Tensor make_wanting(const Shape& sizes, double seed) { return wanting(pattern(sizes, seed)); }
Tensor add_to_ref(const RRef<Tensor>& a, const Tensor& b) { return add(a.local_value(), b); }
Tensor add_to_ref_nested(const RRef<Tensor>& a, const Tensor& b) { return here().call<add_to_ref>(a.owner(), a, b); }

// Answered by a thread that is in no context.
Future<Tensor> plus_later(const Tensor& a, const Tensor& b) {
  Future<Tensor> future;
  std::thread([future, sum = add(a, b)] { future.set(sum); }).detach();
  return future;
}
uint64_t context_here() { return dist_autograd::current_context(); }

const std::vector<Served> kServes{
    remote<stacked>,    remote<nothing>,           remote<nested_plus>,   remote<plus_on>,    remote<make_wanting>,
    remote<add_to_ref>, remote<add_to_ref_nested>, remote<split_in_five>, remote<plus_later>, remote<context_here>};

class DistAutograd : public BothModes {
 protected:
  static void run(int size, const AgentBody& body) { run_agents(size, options(kServes), body); }
};
INSTANTIATE_TEST_SUITE_P(Rpc, DistAutograd, kBothModes, name_of_mode);

// Calls a function here, there, or there with the result left there.
enum class How { kLocal, kCall, kRemote };
template <auto F, class... Args>
auto run_as(How how, Agent& agent, const To& to, const Args&... args) {
  if (how == How::kLocal) return F(args...);
  if (how == How::kCall) return agent.call<F>(to, args...);
  return agent.remote<F>(to, args...).to_here();
}

// The gradients of leaves are those of the same program on this worker alone, in every way of calling, and the leaves'
// own stay untouched. `program` makes a root of the leaves.
using Program = std::function<Tensor(How how, const std::vector<Tensor>& leaves)>;
void expect_as_local(Agent& agent, const std::vector<Tensor>& values, const Program& program) {
  std::vector<Tensor> expected;
  {
    std::vector<Tensor> leaves;
    leaves.reserve(values.size());
    for (const Tensor& value : values) leaves.push_back(requires_grad(value) ? wanting(value) : value);
    backward(program(How::kLocal, leaves));
    for (const Tensor& leaf : leaves) expected.push_back(gradient(leaf));
  }
  for (How how : {How::kCall, How::kRemote}) {
    std::vector<Tensor> leaves;
    leaves.reserve(values.size());
    for (const Tensor& value : values) leaves.push_back(requires_grad(value) ? wanting(value) : value);
    Context context(agent);
    context.backward({program(how, leaves)});
    size_t there = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      expect_near(context.gradient(leaves[i]), expected[i], concat("leaf ", i));
      EXPECT_FALSE(gradient(leaves[i]).defined());
      there += expected[i].defined() ? 1 : 0;
    }
    EXPECT_EQ(context.gradients().size(), there);
  }
}

// ---- contexts

// spec: test_autograd_context
TEST_P(DistAutograd, ContextsHaveNumbersThatSayWhoseTheyAre) {
  run(4, [](Agent& agent, comm::Group& group) {
    const auto own = static_cast<uint64_t>(group.rank());
    Contexts& contexts = agent;
    EXPECT_EQ(contexts.most_id(), 281474976710655u + (own << 48));
    std::vector<uint64_t> ids;
    for (int i = 0; i < 200; ++i) {
      const Context context(agent);
      EXPECT_EQ(context.id() >> 48, own);
      EXPECT_EQ(dist_autograd::current_context(), context.id());
      EXPECT_EQ(contexts.get(context.id())->id, context.id());
      ids.push_back(context.id());
    }
    EXPECT_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), 200u);
    for (uint64_t id : ids) {
      EXPECT_THAT(text_of(Kind::kUnknownContext, [&] { contexts.get(id); }), HasSubstr(concat(id)));
    }
    EXPECT_EQ(dist_autograd::current_context(), 0u);
  });
}

// spec: test_nested_context
TEST_P(DistAutograd, AContextInsideAContextIsAnError) {
  run(4, [](Agent& agent, comm::Group&) {
    Context context(agent);
    text_of(Kind::kNestedContext, [&] { Context inner(agent); });
    EXPECT_EQ(dist_autograd::current_context(), context.id());
    const Tensor x = wanting(pattern({2}, 1));
    context.backward({sum(agent.call<plus>(next(agent), x, x))});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), (std::vector<float>{2, 2}));
  });
}

// Threads of agents serve calls of many contexts, and of none.
TEST_P(DistAutograd, AThreadIsInAContextForTheLengthOfACall) {
  AgentOptions own = options(kServes);
  own.threads = own.most_threads = 2;
  run_agents(4, own, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3}, 1)), y = wanting(pattern({3}, 2));
    for (int i = 0; i < 10; ++i) {
      {
        Context context(agent);
        EXPECT_EQ(agent.call<context_here>(next(agent)), context.id());
        context.backward({sum(mul(agent.call<plus_later>(next(agent), x, y), y))});
        EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
        text_of(Kind::kRemote, [&] { agent.call<product>(next(agent), x, pattern({2}, 1)); });
      }
      for (int step = 1; step < 4; ++step) EXPECT_EQ(agent.call<context_here>(next(agent, step)), 0u);
    }
  });
}

// ---- what is recorded

// spec: test_graph_for_builtin_call, test_graph_for_python_call, test_graph_for_builtin_remote_call
// spec: test_graph_for_python_remote_call
TEST_P(DistAutograd, ACallLeavesOnePairOfNodesEachWay) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(ones({3, 3}, DType::kF32)), y = wanting(zeros({3, 3}, DType::kF32));
    const std::string to = next(agent);
    for (const char* kind : {"call", "op", "remote", "remote op"}) {
      uint64_t id = 0;
      {
        Context context(agent);
        id = context.id();
        const std::string_view text = kind;
        const Tensor z = text == "call"     ? agent.call<plus>(to, x, y)
                         : text == "op"     ? agent.call_op(to, "add", {x, y})
                         : text == "remote" ? agent.remote<plus>(to, x, y).to_here()
                                            : agent.remote_op(to, "add", {x, y}).to_here()[0];
        const Recorded own = recorded(agent, id);
        EXPECT_THAT(own.sends, ElementsAre("send[leaf,leaf]")) << kind;
        EXPECT_EQ(own.receives, 1);
        Contexts& contexts = agent;
        const auto state = contexts.get(id);
        EXPECT_EQ(autograd::edge_of(z).node.get(), state->receives.begin()->second.get());
        const autograd::Node& send = *state->sends.begin()->second;
        EXPECT_TRUE(send.edges[0].leaf.is(x));
        EXPECT_TRUE(send.edges[1].leaf.is(y));
        const Recorded there = agent.call<recorded_here>(to);
        EXPECT_THAT(there.sends, ElementsAre("send[add[receive0,receive0]]")) << kind;
        EXPECT_EQ(there.receives, 1);
      }
      text_of(Kind::kUnknownContext, [&] { recorded(agent, id); });
      EXPECT_EQ(dist_autograd::current_context(), 0u);
    }
  });
}

// spec: test_graph_for_py_nested_{,remote_}call, test_graph_for_py_nested_{,remote_}call_itself
TEST_P(DistAutograd, NestedCallsAreRecordedOnEveryWorkerOnTheWay) {
  run(4, [](Agent& agent, comm::Group& group) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    for (const bool by_reference : {false, true}) {
      {
        Context context(agent);
        by_reference ? agent.remote<nested_plus>(next(agent), x, y, true, 2).to_here()
                     : agent.call<nested_plus>(next(agent), x, y, false, 2);
        EXPECT_THAT(recorded(agent, context.id()).sends, ElementsAre("send[leaf,leaf]"));
        for (int step : {1, 2}) {
          const Recorded middle = agent.call<recorded_here>(next(agent, step));
          EXPECT_THAT(middle.sends, ElementsAre("send[receive0,receive0]", "send[receive1]"));
        }
        EXPECT_THAT(agent.call<recorded_here>(next(agent, 3)).sends, ElementsAre("send[add[receive0,receive0]]"));
      }
      group.barrier().wait();
      {
        Context context(agent);
        by_reference ? agent.remote<plus_on>(next(agent), x, y, agent.info().id, true).to_here()
                     : agent.call<plus_on>(next(agent), x, y, agent.info().id, false);
        const Recorded own = recorded(agent, context.id());
        EXPECT_THAT(own.sends, ElementsAre("send[leaf,leaf]", "send[add[receive0,receive0]]"));
        EXPECT_EQ(own.receives, 2);
      }
      group.barrier().wait();
    }
  });
}

// spec: test_no_graph_with_tensors_not_require_grad, test_no_graph_with_tensors_not_require_grad_remote
TEST_P(DistAutograd, WithoutGradientsOpsLeaveNothing) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = pattern({3, 3}, 1);
    const std::string to = next(agent);
    Context context(agent);
    agent.call_op(to, "add", {x, x});
    agent.remote_op(to, "add", {x, x});
    EXPECT_THAT(recorded(agent, context.id()).known, IsEmpty());
    const Recorded there = agent.call<recorded_here>(to);  // a function carries the context in any case
    EXPECT_THAT(there.sends, IsEmpty());
    EXPECT_EQ(there.receives, 0);
    const Recorded own = recorded(agent, context.id());
    EXPECT_THAT(own.sends, IsEmpty());
    EXPECT_EQ(own.receives, 0);
  });
}

// spec: test_rpc_complex_args, test_remote_complex_args
TEST_P(DistAutograd, OnlyTensorsThatNeedGradientsAreBehindASendNode) {
  run(4, [](Agent& agent, comm::Group&) {
    std::vector<Tensor> all;
    for (int i = 0; i < 10; ++i) {
      all.push_back(pattern({3, 3}, i));
      if (i % 2 == 0) all.back() = wanting(all.back());
    }
    for (How how : {How::kCall, How::kRemote}) {
      Context context(agent);
      run_as<stacked>(how, agent, next(agent), all);
      Contexts& contexts = agent;
      const auto state = contexts.get(context.id());
      ASSERT_EQ(state->sends.size(), 1u);
      const auto& edges = state->sends.begin()->second->edges;
      ASSERT_EQ(edges.size(), 5u);
      for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(edges[i].leaf.is(all[2 * i]));
      EXPECT_EQ(state->known, (std::set<int>{agent.info(next(agent)).id}));
    }
  });
}

// spec: test_worker_ids_recorded
TEST_P(DistAutograd, TheWorkersThatHaveAPartOfAContextAreKnown) {
  run(4, [](Agent& agent, comm::Group& group) {
    std::vector<int> peers;
    for (int step = 1; step < 4; ++step) peers.push_back((group.rank() + step) % 4);
    std::sort(peers.begin(), peers.end());
    const Tensor plain = pattern({3, 3}, 1), x = wanting(plain);
    Context context(agent);
    for (int peer : peers) {
      agent.call_op(peer, "add", {plain, plain});
      agent.call<nothing>(peer);
    }
    EXPECT_EQ(recorded(agent, context.id()).known, peers);
    for (int peer : peers) agent.call_op(peer, "add", {x, x});
    EXPECT_EQ(recorded(agent, context.id()).known, peers);
  });
}

// spec: DistAutogradTest.test_context_cleanup_tensor_with_grad, test_context_cleanup_tensor_no_grad
// spec: test_context_cleanup_nested_rpc, test_context_cleanup_no_tensors
TEST_P(DistAutograd, AllWorkersForgetAContextThatHasEnded) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor plain = pattern({3, 3}, 1), x = wanting(plain);
    const std::function<void()> uses[] = {[&] {
                                            for (int step = 1; step < 4; ++step)
                                              agent.call<plus>(next(agent, step), x, x);
                                          },
                                          [&] {
                                            for (int step = 1; step < 4; ++step)
                                              agent.call<plus>(next(agent, step), plain, plain);
                                          },
                                          [&] {
                                            for (int step = 1; step < 4; ++step) agent.call<nothing>(next(agent, step));
                                          },
                                          [&] { agent.call<nested_plus>(next(agent), x, x, 0, 2); }};
    for (const auto& use : uses) {
      uint64_t id = 0;
      {
        Context context(agent);
        id = context.id();
        use();
        for (int step = 1; step < 4; ++step) EXPECT_TRUE(agent.call<knows_context>(next(agent, step), id));
      }
      text_of(Kind::kUnknownContext, [&] { recorded(agent, id); });
      for (int step = 1; step < 4; ++step) {
        expect_soon("the context is forgotten", [&] { return !agent.call<knows_context>(next(agent, step), id); });
      }
    }
  });
}

// spec: FaultyAgentDistAutogradTest.test_context_cleanup_tensor_with_grad
TEST_P(DistAutograd, CleaningUpIsTriedAgain) {
  AgentOptions own = options(kServes);
  own.faults.fail = Faults::retried();
  run_agents(4, own, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1));
    uint64_t id = 0;
    {
      Context context(agent);
      id = context.id();
      for (int step = 1; step < 4; ++step) agent.call<plus>(next(agent, step), x, x);
    }
    for (int step = 1; step < 4; ++step) {
      expect_soon("the context is forgotten", [&] { return !agent.call<knows_context>(next(agent, step), id); });
    }
  });
}

// spec: test_error_in_context
TEST_P(DistAutograd, AnErrorInAContextLeavesItUsable) {
  run(4, [](Agent& agent, comm::Group&) {
    Context context(agent);
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({6, 6}, 1));
    text_of(Kind::kRemote, [&] { agent.call<product>(next(agent), x, y); });
  });
}

// ---- backward

// spec: test_backward_no_grad_on_tensor
TEST_P(DistAutograd, TheTensorsOwnGradientsStay) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    const Tensor loss = sum(mul(agent.call<plus>(next(agent), x, y), y));
    context.backward({loss}, true);
    EXPECT_FALSE(gradient(x).defined());
    EXPECT_FALSE(gradient(y).defined());
    backward(sum(add(x, y)));
    const auto before = gradient(x).to_vector<float>();
    context.backward({loss});
    EXPECT_EQ(gradient(x).to_vector<float>(), before);
  });
}

// spec: test_backward_simple, test_backward_simple_self, test_backward_simple_python_udf
// spec: test_backward_simple_script_call
TEST_P(DistAutograd, GradientsComeBack) {
  run(4, [](Agent& agent, comm::Group&) {
    const std::vector<Tensor> leaves{wanting(pattern({3, 3}, 1)), wanting(pattern({3, 3}, 2))};
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      expect_as_local(agent, leaves,
                      [&](How how, const auto& t) { return sum(mul(run_as<plus>(how, agent, to, t[0], t[1]), t[0])); });
      expect_as_local(agent, leaves,
                      [&](How how, const auto& t) { return sum(run_as<plus>(how, agent, to, t[0], t[1])); });
    }
  });
}

// What travels is on the CPU; what is made of it need not be.
TEST_P(DistAutograd, ALossMayBeOnADevice) {
  eager::add_sim_device({.most_delay = 20us});
  run(2, [](Agent& agent, comm::Group&) {
    constexpr Device device{DeviceType::kSim, 0};
    const std::vector<Tensor> leaves{wanting(pattern({3, 3}, 1)), wanting(pattern({3, 3}, 2))};
    expect_as_local(agent, leaves, [&](How how, const auto& t) {
      const Tensor there = to(run_as<plus>(how, agent, next(agent), t[0], t[1]), device);
      return sum(mul(there, to(t[0], device)));
    });
  });
}

// spec: test_backward_complex_python_udf, test_backwards_nested_python_udf
TEST_P(DistAutograd, GradientsComeBackThroughNestedCalls) {
  run(4, [](Agent& agent, comm::Group&) {
    const std::vector<Tensor> leaves{wanting(pattern({3, 3}, 1)), wanting(pattern({3, 3}, 2)),
                                     wanting(pattern({3, 3}, 3)), wanting(pattern({3, 3}, 4))};
    expect_as_local(agent, leaves, [&](How how, const auto& t) {
      const Tensor nested =
          how == How::kLocal ? add(t[0], t[1]) : run_as<nested_plus>(how, agent, next(agent), t[0], t[1], 0, 2);
      return sum(mul(mul(mul(t[0], t[1]), mul(t[2], t[3])), nested));
    });
  });
}

// spec: test_grad_only_on_return_value, test_grad_only_on_return_value_remote
TEST_P(DistAutograd, AFunctionMayReturnATensorOfItsOwn) {
  run(4, [](Agent& agent, comm::Group&) {
    for (How how : {How::kCall, How::kRemote}) {
      Context context(agent);
      context.backward({sum(run_as<make_wanting>(how, agent, next(agent), Shape{3, 3}, 5))});
      const auto there = agent.call<gradients_here>(next(agent), context.id());
      ASSERT_EQ(there.size(), 1u);
      EXPECT_EQ(there[0].second.to_vector<float>(), std::vector<float>(9, 1));
      EXPECT_EQ(there[0].first.to_vector<float>(), pattern({3, 3}, 5).to_vector<float>());
    }
  });
}

// spec: test_backward_rref, test_backward_rref_nested, test_trainer_ps, test_backward_rref_multi
TEST_P(DistAutograd, GradientsOfReferredTensorsStayWithTheirOwner) {
  run(4, [](Agent& agent, comm::Group& group) {
    const double seed = group.rank() + 1;
    const auto check = [&](const To& owner, const Tensor& t, const auto& use) {
      const RRef<Tensor> w = agent.remote<make_wanting>(owner, Shape{3, 3}, seed);
      Context context(agent);
      const Tensor y = use(w, t);
      context.backward({sum(mul(y, y))});
      const auto expected = mul(add(pattern({3, 3}, seed), t.alias()), 2).template to_vector<float>();
      EXPECT_EQ(context.gradient(t).template to_vector<float>(), expected);
      EXPECT_EQ(context.gradients().size(), 1u);
      const auto there = agent.call<gradients_here>(owner, context.id());
      ASSERT_EQ(there.size(), 1u);
      EXPECT_EQ(there[0].second.template to_vector<float>(), expected);
      EXPECT_EQ(there[0].first.template to_vector<float>(), pattern({3, 3}, seed).template to_vector<float>());
    };
    const Tensor t = wanting(pattern({3, 3}, 10 + seed));
    check(next(agent), t,
          [&](const auto& w, const Tensor& x) { return agent.remote<add_to_ref>(w.owner(), w, x).to_here(); });
    check(next(agent, 2), t,
          [&](const auto& w, const Tensor& x) { return agent.remote<add_to_ref_nested>(next(agent), w, x).to_here(); });
    // All at one owner, at once; and everybody the owner of all others'.
    group.barrier().wait();
    if (group.rank() > 0) check(0, t, [&](const auto& w, const Tensor& x) { return agent.call<add_to_ref>(0, w, x); });
    for (int step = 1; step < 4; ++step) {
      check(next(agent, step), t,
            [&](const auto& w, const Tensor& x) { return agent.call<add_to_ref>(w.owner(), w, x); });
    }
  });
}

// spec: test_backward_multiple_round_trips, test_backward_different_tensor_dims, test_backward_unused_tensors
// spec: test_backward_multiple_output_tensors
TEST_P(DistAutograd, ProgramsOfManyCallsGiveTheGradientsOfOneWorker) {
  run(4, [](Agent& agent, comm::Group&) {
    const auto wanted = [](double seed) { return wanting(pattern({3, 3}, seed)); };
    expect_as_local(agent, {wanted(1), pattern({3, 3}, 2), wanted(3), pattern({3, 3}, 4), wanted(5)},
                    [&](How how, const auto& t) {
                      const auto at = [&](int step) { return To(next(agent, step)); };
                      const Tensor a = run_as<plus>(how, agent, at(1), t[0], t[1]);
                      const Tensor b = run_as<times>(how, agent, at(2), a, t[2]);
                      const Tensor c = run_as<stacked>(how, agent, at(3), std::vector{b, t[3]});
                      const Tensor d = run_as<stacked>(how, agent, at(1), std::vector{t[4], a});
                      return sum(run_as<product>(how, agent, at(2), run_as<product>(how, agent, at(3), c, d), t[0]));
                    });
    expect_as_local(agent,
                    {wanting(pattern({4, 6}, 1)), wanting(pattern({6, 5}, 2)), wanting(pattern({5, 7}, 3)),
                     wanting(pattern({7, 9}, 4))},
                    [&](How how, const auto& t) {
                      const Tensor a = run_as<product>(how, agent, next(agent), t[0], t[1]);
                      return sum(matmul(matmul(a, t[2]), t[3]));
                    });
    expect_as_local(agent, {wanted(1), wanted(2), wanted(3)}, [&](How how, const auto& t) {
      const Tensor all = run_as<stacked>(how, agent, next(agent), std::vector{t[0], t[1], t[2]});
      return sum(matmul(select(all, 0, 0), select(all, 0, 2)));
    });
    expect_as_local(agent, {wanting(pattern({10, 2}, 1))}, [&](How how, const auto& t) {
      const auto parts = run_as<split_in_five>(how, agent, next(agent), t[0]);
      return sum(mul(mul(parts[0], parts[2]), parts[4]));
    });
  });
}

// spec: test_backward_different_dtypes
TEST_P(DistAutograd, EachLeafsGradientHasItsDtype) {
  run(4, [](Agent& agent, comm::Group&) {
    expect_as_local(agent, {wanting(pattern({3, 3}, 1)), wanting(to(pattern({3, 3}, 2), DType::kF64))},
                    [&](How how, const auto& t) { return sum(run_as<plus>(how, agent, next(agent), t[0], t[1])); });
  });
}

}  // namespace
}  // namespace chorale::rpc
