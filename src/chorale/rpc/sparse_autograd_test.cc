// Distributed autograd with sparse tensors, whose values have the gradients: the sparse twins of B2 in
// spec/rpc-and-distributed-autograd.md, in both modes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::Contexts;
using testing::ElementsAre;
using testing::IsEmpty;
using Kind = RpcErrorKind;

// The example of the catalogue, its values times a factor; with `wanted` they are a leaf that requires a gradient.
Tensor sparse_times(double factor, bool wanted) {
  const Tensor example = sparse_example();
  const Tensor values = mul(example.sparse().values, factor);
  if (wanted) set_requires_grad(values);
  return Tensor::sparse_coo(example.sparse().indices, values, {3, 3});
}
const Tensor& values_of(const Tensor& x) { return x.sparse().values; }

Tensor plus(const Tensor& a, const Tensor& b) { return sparse_add(a, b); }
Tensor nested_plus(const Tensor& a, const Tensor& b, int64_t hops, bool by_reference) {
  Agent agent = here();
  if (hops == 0) return sparse_add(a, b);
  const auto worker = (agent.info().id + 1) % static_cast<int64_t>(agent.workers().size());
  if (by_reference) return agent.remote<nested_plus>(worker, a, b, hops - 1, by_reference).to_here();
  return agent.call<nested_plus>(worker, a, b, hops - 1, by_reference);
}
Tensor plus_on(const Tensor& a, const Tensor& b, int64_t worker, bool by_reference) {
  if (by_reference) return here().remote<plus>(worker, a, b).to_here();
  return here().call<plus>(worker, a, b);
}
Tensor total(const std::vector<Tensor>& all) {
  Tensor sum = all[0];
  for (size_t i = 1; i < all.size(); ++i) sum = sparse_add(sum, all[i]);
  return sum;
}
Tensor if_wanted(const Tensor& a, const Tensor& b) {
  return requires_grad(values_of(b)) ? sparse_scale(sparse_add(a, b), 5) : sparse_add(a, b);
}
Tensor make_weight(double factor) { return sparse_times(factor, true); }
Tensor add_to_ref(const RRef<Tensor>& a, const Tensor& b) { return sparse_add(a.local_value(), b); }
Tensor add_to_ref_nested(const RRef<Tensor>& a, const Tensor& b) { return here().call<add_to_ref>(a.owner(), a, b); }
void nothing() {}
// Adds f32 to f64, in f64.
Tensor plus_mixed(const Tensor& a, const Tensor& b) {
  return sparse_add(Tensor::sparse_coo(a.sparse().indices, to(a.sparse().values, DType::kF64), a.sizes()), b);
}

// A function: not every compiler has made what it lists before a variable that begins with it.
std::vector<Served> functions() {
  return {remote<plus>,      remote<nested_plus>, remote<plus_on>,    remote<total>,
          remote<if_wanted>, remote<make_weight>, remote<add_to_ref>, remote<add_to_ref_nested>,
          remote<nothing>,   remote<plus_mixed>,  remote<sparse_add>};
}

class SparseAutograd : public BothModes {
 protected:
  static void run(const AgentBody& body) { run_agents(4, options(functions()), body); }
};
INSTANTIATE_TEST_SUITE_P(Rpc, SparseAutograd, kBothModes, name_of_mode);

// A loss whose gradient depends on the place: [10, 11, …, 18] times how often an entry went in.
Tensor loss_of(const Tensor& sparse) {
  return sum(mul(to_dense(sparse), view(arange(10, 19, 1, DType::kF32), {3, 3})));
}
// The values at (0, 2), (1, 0) and (1, 2).
std::vector<float> expected(float times) { return {12 * times, 13 * times, 15 * times}; }

// spec: test_backward_simple_sparse, test_backward_simple_self_sparse, test_backward_no_grad_on_tensor_sparse
TEST_P(SparseAutograd, GradientsComeBack) {
  run([](Agent& agent, comm::Group&) {
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      for (const bool by_reference : {false, true}) {
        const Tensor x = sparse_times(1, true), y = sparse_times(2, true);
        Context context(agent);
        const Tensor z = by_reference ? agent.remote<plus>(to, x, y).to_here() : agent.call<plus>(to, x, y);
        const Tensor loss = loss_of(sparse_add(z, x));
        context.backward({loss}, true);
        EXPECT_EQ(context.gradient(values_of(x)).to_vector<float>(), expected(2));
        EXPECT_EQ(context.gradient(values_of(y)).to_vector<float>(), expected(1));
        EXPECT_EQ(context.gradients().size(), 2u);
        EXPECT_FALSE(gradient(values_of(x)).defined());
        backward(loss_of(x));
        context.backward({loss});
        EXPECT_EQ(gradient(values_of(x)).to_vector<float>(), expected(1));
        EXPECT_EQ(context.gradient(values_of(x)).to_vector<float>(), expected(4));
      }
    }
  });
}

// The call is of a function of the library, and of one of this test.
// spec: test_graph_for_builtin_call_sparse, test_graph_for_builtin_remote_call_sparse
// spec: test_graph_for_python_call_sparse, test_graph_for_python_remote_call_sparse
TEST_P(SparseAutograd, ACallLeavesOnePairOfNodesEachWay) {
  run([](Agent& agent, comm::Group&) {
    for (const bool of_library : {false, true}) {
      for (const bool by_reference : {false, true}) {
        const Tensor x = sparse_times(1, true), y = sparse_times(2, true);
        uint64_t id = 0;
        {
          Context context(agent);
          id = context.id();
          const std::string to = next(agent);
          const Tensor z =
              of_library
                  ? (by_reference ? agent.remote<sparse_add>(to, x, y).to_here() : agent.call<sparse_add>(to, x, y))
                  : (by_reference ? agent.remote<plus>(to, x, y).to_here() : agent.call<plus>(to, x, y));
          const Recorded own = recorded(agent, id);
          EXPECT_THAT(own.sends, ElementsAre("send[leaf,leaf]"));
          EXPECT_EQ(own.receives, 1);
          const auto state = static_cast<Contexts&>(agent).get(id);
          EXPECT_EQ(autograd::edge_of(values_of(z)).node.get(), state->receives.begin()->second.get());
          const autograd::Node& send = *state->sends.begin()->second;
          EXPECT_TRUE(send.edges[0].leaf.is(values_of(x)));
          EXPECT_TRUE(send.edges[1].leaf.is(values_of(y)));
          // The values of a sum are those of both, one behind the other.
          EXPECT_THAT(agent.call<recorded_here>(to).sends, ElementsAre("send[cat[receive0,receive0]]"));
        }
        text_of(Kind::kUnknownContext, [&] { recorded(agent, id); });
        EXPECT_EQ(dist_autograd::current_context(), 0u);
      }
    }
  });
}

// spec: test_graph_for_py_nested_{,remote_}call_sparse, test_graph_for_py_nested_{,remote_}call_itself_sparse
TEST_P(SparseAutograd, NestedCallsAreRecorded) {
  run([](Agent& agent, comm::Group&) {
    for (const bool by_reference : {false, true}) {
      const Tensor x = sparse_times(1, true), y = sparse_times(2, true);
      {
        Context context(agent);
        agent.call<nested_plus>(next(agent), x, y, 2, by_reference);
        EXPECT_THAT(recorded(agent, context.id()).sends, ElementsAre("send[leaf,leaf]"));
        for (int step : {1, 2}) {
          EXPECT_THAT(agent.call<recorded_here>(next(agent, step)).sends,
                      ElementsAre("send[receive0,receive0]", "send[receive1]"));
        }
        EXPECT_THAT(agent.call<recorded_here>(next(agent, 3)).sends, ElementsAre("send[cat[receive0,receive0]]"));
      }
      Context context(agent);
      agent.call<plus_on>(next(agent), x, y, agent.info().id, by_reference);
      const Recorded own = recorded(agent, context.id());
      EXPECT_EQ(own.sends.size(), 2u);
      EXPECT_EQ(own.receives, 2);
    }
  });
}

// spec: test_{rpc,remote}_complex_args_sparse
TEST_P(SparseAutograd, OnlyValuesThatNeedGradientsAreBehindASendNode) {
  run([](Agent& agent, comm::Group&) {
    std::vector<Tensor> all;
    all.reserve(10);
    for (int i = 0; i < 10; ++i) all.push_back(sparse_times(i + 1, i % 2 == 0));
    for (const bool by_reference : {false, true}) {
      Context context(agent);
      by_reference ? agent.remote<total>(next(agent), all).to_here() : agent.call<total>(next(agent), all);
      const auto state = static_cast<Contexts&>(agent).get(context.id());
      ASSERT_EQ(state->sends.size(), 1u);
      const auto& edges = state->sends.begin()->second->edges;
      ASSERT_EQ(edges.size(), 5u);
      for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(edges[i].leaf.is(values_of(all[2 * i])));
      EXPECT_EQ(state->known, (std::set<int>{agent.info(next(agent)).id}));
    }
  });
}

// spec: test_context_cleanup_tensor_with_grad_sparse, test_context_cleanup_{tensor_no_grad,nested_rpc}{,_sparse}
TEST_P(SparseAutograd, AllWorkersForgetAContextThatHasEnded) {
  run([](Agent& agent, comm::Group&) {
    for (const bool wanted : {true, false}) {
      for (const bool nested : {true, false}) {
        const Tensor x = sparse_times(1, wanted);
        uint64_t id = 0;
        {
          Context context(agent);
          id = context.id();
          if (nested) {
            agent.call<nested_plus>(next(agent), x, x, 2, false);
          } else {
            for (int step = 1; step < 4; ++step) agent.call<plus>(next(agent, step), x, x);
          }
        }
        text_of(Kind::kUnknownContext, [&] { recorded(agent, id); });
        for (int step = 1; step < 4; ++step) {
          expect_soon("the context is forgotten", [&] { return !agent.call<knows_context>(next(agent, step), id); });
        }
      }
    }
  });
}

// spec: test_backward_rref_sparse, test_backward_rref_multi_sparse, test_backward_rref_nested_sparse
// spec: test_trainer_ps_sparse
TEST_P(SparseAutograd, GradientsOfReferredTensorsStayWithTheirOwner) {
  run([](Agent& agent, comm::Group& group) {
    const auto check = [&](const To& owner, const To& callee) {
      const RRef<Tensor> w = agent.remote<make_weight>(owner, group.rank() + 1);
      const Tensor t = sparse_times(1, true);
      Context context(agent);
      const bool direct = agent.info(owner) == agent.info(callee);
      const Tensor y =
          direct ? agent.remote<add_to_ref>(callee, w, t).to_here() : agent.call<add_to_ref_nested>(callee, w, t);
      context.backward({loss_of(y)});
      EXPECT_EQ(context.gradient(values_of(t)).to_vector<float>(), expected(1));
      const auto there = agent.call<gradients_here>(owner, context.id());
      ASSERT_EQ(there.size(), 1u);
      EXPECT_EQ(there[0].second.to_vector<float>(), expected(1));
      EXPECT_EQ(there[0].first.to_vector<float>(), values_of(sparse_times(group.rank() + 1, false)).to_vector<float>());
    };
    check(next(agent), next(agent));
    check(next(agent, 2), next(agent));
    if (group.rank() > 0) check(0, 0);
    for (int step = 1; step < 4; ++step) check(next(agent, step), next(agent, step));
  });
}

// spec: test_backward_multiple_round_trips_sparse, test_backwards_nested_python_udf_sparse
TEST_P(SparseAutograd, ManyRoundTripsGiveTheGradientsOfOneWorker) {
  run([](Agent& agent, comm::Group&) {
    const Tensor t1 = sparse_times(1, true), t2 = sparse_times(2, false), t3 = sparse_times(3, true);
    Context context(agent);
    const Tensor a = agent.call<plus>(next(agent), t1, t2), b = agent.remote<plus>(next(agent, 2), a, t3).to_here(),
                 c = agent.call<total>(next(agent, 3), std::vector{a, b, t1}),
                 d = agent.call<nested_plus>(next(agent), b, c, 2, false);
    context.backward({loss_of(d)});
    // t1 is in a, b and c: b + a + b + t1.
    EXPECT_EQ(context.gradient(values_of(t1)).to_vector<float>(), expected(4));
    EXPECT_EQ(context.gradient(values_of(t3)).to_vector<float>(), expected(2));
    EXPECT_EQ(context.gradients().size(), 2u);
  });
}

// spec: test_mixed_requires_grad{,_sparse}
TEST_P(SparseAutograd, WhetherValuesNeedAGradientArrives) {
  run([](Agent& agent, comm::Group&) {
    const Tensor x = sparse_times(1, true), y = sparse_times(2, false);
    Context context(agent);
    context.backward({loss_of(agent.call<if_wanted>(next(agent), x, y))});
    EXPECT_EQ(context.gradients().size(), 1u);
    EXPECT_EQ(context.gradient(values_of(x)).to_vector<float>(), expected(1));
  });
}

// spec: test_nested_backward_accumulate_grads{,_sparse}, test_multiple_backward{,_sparse}
TEST_P(SparseAutograd, SeveralBackwardsAddUp) {
  run([](Agent& agent, comm::Group&) {
    const Tensor x = sparse_times(1, true), y = sparse_times(2, true);
    Context context(agent);
    const Tensor nested = loss_of(agent.call<nested_plus>(next(agent), x, y, 2, false));
    context.backward({nested}, true);
    context.backward({nested});
    EXPECT_EQ(context.gradient(values_of(x)).to_vector<float>(), expected(2));
    const Tensor loss = loss_of(agent.call<plus>(next(agent), x, y));
    for (int i = 0; i < 1000; ++i) context.backward({loss}, true);
    EXPECT_EQ(context.gradient(values_of(y)).to_vector<float>(), expected(1002));
  });
}

// spec: test_no_graph_with_tensors_not_require_grad{,_remote}{,_sparse}
TEST_P(SparseAutograd, WithoutGradientsNothingIsRecorded) {
  run([](Agent& agent, comm::Group&) {
    const Tensor x = sparse_times(1, false);
    Context context(agent);
    agent.call<plus>(next(agent), x, x);
    agent.remote<plus>(next(agent), x, x).to_here();
    const Recorded own = recorded(agent, context.id()), there = agent.call<recorded_here>(next(agent));
    EXPECT_THAT(own.sends, IsEmpty());
    EXPECT_THAT(there.sends, IsEmpty());
    EXPECT_EQ(own.receives + there.receives, 0);
  });
}

// spec: test_backward_different_dtypes_sparse
TEST_P(SparseAutograd, EachLeafsGradientHasItsDtype) {
  run([](Agent& agent, comm::Group&) {
    const Tensor x = sparse_times(1, true), example = sparse_example();
    const Tensor values = set_requires_grad(to(example.sparse().values, DType::kF64));
    const Tensor y = Tensor::sparse_coo(example.sparse().indices, values, {3, 3});
    for (const bool by_reference : {false, true}) {
      Context context(agent);
      const Tensor z = by_reference ? agent.remote<plus_mixed>(next(agent), x, y).to_here()
                                    : agent.call<plus_mixed>(next(agent), x, y);
      ASSERT_EQ(z.sparse().values.dtype(), DType::kF64);
      context.backward({loss_of(z)});
      EXPECT_EQ(context.gradient(values_of(x)).dtype(), DType::kF32);
      EXPECT_EQ(context.gradient(values_of(x)).to_vector<float>(), expected(1));
      EXPECT_EQ(context.gradient(values).dtype(), DType::kF64);
      EXPECT_EQ(context.gradient(values).to_vector<double>(), (std::vector<double>{12, 13, 15}));
    }
  });
}

}  // namespace
}  // namespace chorale::rpc
