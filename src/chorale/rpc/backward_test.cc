// Backward over several workers (spec/rpc-and-distributed-autograd.md, B2), in both modes: roots, repetition, hooks,
// errors, results that nobody uses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <future>
#include <latch>
#include <thread>

#include "chorale/rpc/context_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Contexts;
using dist_autograd::Mode;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::plus;
using served::product;
using served::times;

// a + b on the last of a ring of workers, handed from one to the next.
Tensor nested_plus(const Tensor& a, const Tensor& b, int64_t hops) {
  Agent agent = here();
  if (hops == 0) return add(a, b);
  return agent.call<nested_plus>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), a, b, hops - 1);
}
Tensor if_wanted(const Tensor& a, const Tensor& b) { return requires_grad(b) ? sub(a, b) : mul(a, b); }

struct Throws final : Function {
  const char* name() const override { return "throws"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { throw StateError("simulated error in backward"); }
};
Tensor throwing(const Tensor& x, int64_t hops) {
  if (hops == 0) return apply<Throws>({x})[0];
  Agent agent = here();
  return agent.call<throwing>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), x, hops - 1);
}
std::atomic<int> failures_left{0};
struct ThrowsSometimes final : Function {
  const char* name() const override { return "throws sometimes"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {clone(in[0])}; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    if (failures_left > 0) throw StateError("simulated error in backward");
    return {dout[0]};
  }
};
Tensor throwing_sometimes(const Tensor& x) { return apply<ThrowsSometimes>({x})[0]; }

// The sum of its inputs; hands its gradient to each of them, and says where that lies.
const void* address_of(const Tensor& x) { return x.is_sparse() ? x.sparse().values.raw() : x.raw(); }
struct HandsOn final : Function {
  // What it has seen.
  struct Seen {
    const void* address = nullptr;
    Tensor values{};  // of a sparse gradient, which others may have without sharing the gradient
  };
  explicit HandsOn(Seen& what) : seen(what) {}
  const char* name() const override { return "hands on"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    count = in.size();
    return {count == 1 ? clone(in[0]) : add(in[0], in[1])};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    seen.address = address_of(dout[0]);
    if (dout[0].is_sparse()) seen.values = dout[0].sparse().values;
    return std::vector<Tensor>(count, dout[0]);
  }
  size_t count = 0;
  Seen& seen;
};
// One, whatever it is given; its gradient is one number that is read again and again.
struct Spreads final : Function {
  const char* name() const override { return "spreads"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    sizes = in[0].sizes();
    return {ones({})};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {expand(ones({1, 1}), sizes)}; }
  Shape sizes;
};

const std::vector<Served> kServes{remote<nested_plus>, remote<if_wanted>, remote<throwing>, remote<throwing_sometimes>};

class DistBackward : public BothModes {
 protected:
  static void run(int size, const AgentBody& body) { run_agents(size, options(kServes), body); }
};
INSTANTIATE_TEST_SUITE_P(Rpc, DistBackward, kBothModes, name_of_mode);

// Calls a function there, with the result brought here or left there first.
template <auto F, class... Args>
auto run_as(bool by_reference, Agent& agent, const To& to, const Args&... args) {
  if (!by_reference) return agent.call<F>(to, args...);
  return agent.remote<F>(to, args...).to_here();
}

// spec: test_backward_without_context
TEST_P(DistBackward, BackwardOfAContextThatIsNotThereIsAnError) {
  run(4, [](Agent& agent, comm::Group&) {
    Contexts& contexts = agent;
    const Tensor x = wanting(pattern({3}, 1));
    EXPECT_THAT(text_of(Kind::kUnknownContext, [&] { contexts.backward(100, {sum(x)}, false); }),
                HasSubstr("context 100"));
  });
}

// spec: test_backward_without_rpc
TEST_P(DistBackward, WorksWithoutAnyCall) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    context.backward({sum(add(x, y))});
    ASSERT_EQ(context.gradients().size(), 2u);
    for (const auto& [leaf, gradient] : context.gradients())
      EXPECT_EQ(gradient.to_vector<float>(), std::vector<float>(9, 1));
    EXPECT_FALSE(gradient(x).defined());
  });
}

// spec: test_backward_invalid_args
TEST_P(DistBackward, RootsAreChecked) {
  run(4, [](Agent& agent, comm::Group&) {
    Context context(agent);
    const Tensor x = wanting(pattern({1}, 1));
    const auto text = [&](const std::vector<Tensor>& roots) -> std::string {
      try {
        context.backward(roots);
      } catch (const Error& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_THAT(text({}), HasSubstr("at least one root"));
    EXPECT_THAT(text({pattern({1}, 1)}), HasSubstr("does not require a gradient"));
    EXPECT_THAT(text({wanting(pattern({3, 3}, 1))}), HasSubstr("must have one element, not shape [3, 3]"));
    EXPECT_THAT(text({x}), HasSubstr("is a leaf"));
  });
}

// spec: test_backward_multiple_roots
TEST_P(DistBackward, SeveralRootsAddUp) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor vx = wanting(pattern({3, 3}, 1)), vy = wanting(pattern({3, 3}, 2));
    const auto roots = [&](bool here, const Tensor& x, const Tensor& y) -> std::vector<Tensor> {
      const auto call = [&](const char* op, const std::vector<Tensor>& in) {
        return agent.call_op(here ? To(agent.info()) : To(next(agent)), op, in);
      };
      return {sum(call("add", {x, y})), sum(call("mul", {x, y})), sum(call("cos", {x})), sum(call("div", {x, y}))};
    };
    const Tensor x = wanting(vx), y = wanting(vy), lx = wanting(vx), ly = wanting(vy);
    backward(add(add(sum(add(lx, ly)), sum(mul(lx, ly))), add(sum(cos(lx)), sum(div(lx, ly)))));
    Context context(agent);
    context.backward(roots(false, x, y));
    const auto close = [](const Tensor& a, const Tensor& b) {
      const auto va = a.to_vector<float>(), vb = b.to_vector<float>();
      for (size_t i = 0; i < va.size(); ++i) EXPECT_NEAR(va[i], vb[i], 1e-4f * (1 + std::abs(vb[i])));
    };
    close(context.gradient(x), gradient(lx));
    close(context.gradient(y), gradient(ly));
  });
}

// spec: test_mixed_requires_grad
TEST_P(DistBackward, WhetherATensorNeedsAGradientArrives) {
  run(4, [](Agent& agent, comm::Group&) {
    for (const bool by_reference : {false, true}) {
      const Tensor x = wanting(pattern({3, 3}, 1)), y = pattern({3, 3}, 2);
      Context context(agent);
      const Tensor z = run_as<if_wanted>(by_reference, agent, next(agent), x, y);
      EXPECT_EQ(z.to_vector<float>(), mul(x.alias(), y).to_vector<float>());
      context.backward({sum(z)});
      EXPECT_EQ(context.gradients().size(), 1u);
      EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
    }
  });
}

// spec: test_backward_accumulate_grads, test_nested_backward_accumulate_grads
TEST_P(DistBackward, SeveralBackwardsAddUp) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2)), lx = wanting(x);
    backward(sum(matmul(lx, y.alias())), {}, {.retain_graph = true});
    const auto once = gradient(lx).to_vector<float>();
    Context context(agent);
    const Tensor loss = sum(agent.call<product>(next(agent), x, y));
    context.backward({loss}, true);
    EXPECT_EQ(context.gradient(x).to_vector<float>(), once);
    context.backward({loss});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), add(gradient(lx), gradient(lx)).to_vector<float>());
    const Tensor nested = sum(agent.call<nested_plus>(next(agent), x, y, 2));
    context.backward({nested}, true);
    context.backward({nested});
  });
}

// spec: test_multiple_backward
TEST_P(DistBackward, CanBeRepeatedOften) {
  run(4, [](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    const Tensor loss = sum(agent.call<plus>(next(agent), x, y));
    for (int i = 0; i < 1000; ++i) context.backward({loss}, true);
    EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(9, 1000));
  });
}

// spec: test_backward_verify_hooks
TEST_P(DistBackward, HooksOfLeavesSeeAndReplaceGradients) {
  run(4, [](Agent& agent, comm::Group&) {
    for (const bool by_reference : {false, true}) {
      const Tensor x = wanting(ones({3, 3}, DType::kF32)), y = wanting(pattern({3, 3}, 2));
      on_gradient(x, [](const Tensor& g) { return mul(g, 2); });
      Context context(agent);
      context.backward({sum(run_as<product>(by_reference, agent, next(agent), x, y))});
      const Tensor lx = wanting(x), ly = wanting(y);
      backward(sum(matmul(lx, ly)));
      EXPECT_EQ(context.gradient(x).to_vector<float>(), mul(gradient(lx), 2).to_vector<float>());
      EXPECT_EQ(context.gradient(y).to_vector<float>(), gradient(ly).to_vector<float>());
    }
  });
}

// ---- errors

// spec: test_backward_autograd_engine_error, test_backward_python_udf_error
TEST_P(DistBackward, AnErrorFarAwayArrivesWithItsWorkerAndText) {
  run(4, [](Agent& agent, comm::Group& group) {
    const Tensor x = wanting(pattern({3, 3}, 1));
    for (int hops : {0, 1, 2}) {
      Context context(agent);
      const Tensor y = agent.call<throwing>(next(agent), x, hops);
      const int there = (group.rank() + 1 + hops) % 4;
      EXPECT_THAT(text_of(Kind::kRemote, there, [&] { context.backward({sum(y)}); }),
                  HasSubstr("simulated error in backward"));
    }
  });
}

// spec: test_multiple_backward_with_errors
TEST_P(DistBackward, AfterErrorsTheSameContextWorks) {
  failures_left = 50 * 4;
  std::barrier all_failed(4);
  run(4, [&](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1));
    Context context(agent);
    const Tensor loss = sum(agent.call<throwing_sometimes>(next(agent), x));
    for (int i = 0; i < 50; ++i) {
      text_of(Kind::kRemote, [&] { context.backward({loss}, true); });
      --failures_left;
    }
    all_failed.arrive_and_wait();
    EXPECT_EQ(failures_left, 0);
    for (int i = 0; i < 49; ++i) context.backward({loss}, true);
    EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(9, 49));
  });
}

// spec: test_backward_unused_send_function
TEST(DistAutogradFast, AResultThatNobodyUsesKeepsBackwardWaiting) {
  AgentOptions options = for_context_tests(kServes);
  options.backward = Mode::kFast;
  comm::run_ranks(4, [&](comm::Group& group) {
    Agent agent(group, options);
    if (group.rank() == 0) {
      const Tensor x = wanting(pattern({3, 3}, 1));
      std::promise<void> ended;
      std::thread helper([&] {
        Context context(agent);
        agent.call<plus>(next(agent), x, x);  // its result is dropped
        const Tensor y = agent.call<times>(next(agent), x, x);
        try {
          context.backward({sum(y)});
          ADD_FAILURE() << "it ended";
        } catch (const RpcError&) {  // the agent was shut down
        }
        ended.set_value();
      });
      EXPECT_EQ(ended.get_future().wait_for(10s), std::future_status::timeout);
      agent.shutdown_now();
      helper.join();
    }
    group.barrier().wait();
    if (group.rank() > 0) agent.shutdown_now();
  });
}

TEST(DistAutogradSmart, AResultThatNobodyUsesIsNotWaitedFor) {
  run_agents(4, for_context_tests(kServes), [&](Agent& agent, comm::Group&) {
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    const Tensor dropped = agent.call<nested_plus>(next(agent), x, y, 2);
    agent.remote<times>(next(agent, 2), x, y);
    const Tensor used = agent.call<times>(next(agent), x, y);
    context.backward({sum(used)});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), y.to_vector<float>());
    EXPECT_EQ(context.gradient(y).to_vector<float>(), x.to_vector<float>());
    // What was not used then can be used now.
    context.backward({sum(dropped)});
    EXPECT_EQ(context.gradient(x).to_vector<float>(), add(y.alias(), 1).to_vector<float>());
    // What a function does not use gets no gradient.
    context.backward({sum(mul(agent.call<if_wanted>(next(agent), x, agent.call<plus>(next(agent, 2), x, y)), 0))});
  });
}

// spec: test_no_grad_copy, test_no_grad_copy_sparse, test_grad_copy_sparse_indices_extra_ref
TEST_P(DistBackward, TakesAGradientThatItAloneHasAndCopiesOthersForEachLeaf) {
  run(4, [](Agent& agent, comm::Group& group) {
    const double seed = group.rank();
    const Tensor a = wanting(pattern({5, 6}, 1 + seed)), b = wanting(pattern({5, 6}, 2 + seed));
    HandsOn::Seen seen;
    const auto sum_of_both = [&] { return apply<HandsOn>({a, b}, seen)[0]; };
    const auto alone = [&] { return apply<HandsOn>({a}, seen)[0]; };
    const auto one_element = [](const Tensor& x) { return sum(narrow(narrow(x, 0, 1, 1), 1, 0, 1)); };
    const Tensor rows = Tensor::from<int64_t>({4, 1, 4, 0}, {4});
    const auto looked_up = [&](const Tensor& table) { return sum(embedding(rows, table, {}, true)); };
    const auto expect_two_copies = [&](const Tensor& root, const std::vector<float>& expected) {
      Context context(agent);
      context.backward({root});
      const Tensor da = context.gradient(a), db = context.gradient(b);
      EXPECT_NE(address_of(da), seen.address);
      EXPECT_NE(address_of(db), seen.address);
      EXPECT_NE(address_of(da), address_of(db));
      EXPECT_EQ(to_dense(da).to_vector<float>(), expected);
      EXPECT_EQ(to_dense(db).to_vector<float>(), expected);
    };
    const auto expect_taken = [&](const Tensor& root, const std::vector<float>& expected) {
      Context context(agent);
      context.backward({root});
      EXPECT_EQ(address_of(context.gradient(a)), seen.address);
      EXPECT_EQ(to_dense(context.gradient(a)).to_vector<float>(), expected);
    };
    std::vector<float> at_one(30), at_rows(30);
    at_one[6] = 1;
    for (const size_t row : std::vector<size_t>{4, 1, 4, 0}) {
      for (size_t i = 0; i < 6; ++i) at_rows[6 * row + i] += 1;
    }
    expect_two_copies(apply<Spreads>({sum_of_both()})[0], std::vector<float>(30, 1));
    expect_taken(one_element(alone()), at_one);
    expect_two_copies(one_element(sum_of_both()), at_one);
    expect_taken(looked_up(alone()), at_rows);
    EXPECT_TRUE(seen.values.defined());
    expect_two_copies(looked_up(sum_of_both()), at_rows);
  });
}

}  // namespace
}  // namespace chorale::rpc
