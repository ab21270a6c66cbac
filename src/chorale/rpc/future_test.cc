#include "chorale/rpc/future.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "chorale/rpc/agents_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

std::exception_ptr problem(const char* text) { return std::make_exception_ptr(StateError(text)); }

std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

// spec: test_mark_future_twice, test_future_done, test_future_done_exception, test_future_wait_twice
TEST(Futures, AreCompletedOnceAndWaitedForAsOftenAsOneLikes) {
  const Future<int> good, bad;
  EXPECT_FALSE(good.is_complete());
  good.set(5);
  bad.set_error(problem("no luck"));
  EXPECT_TRUE(good.is_complete() && bad.is_complete());
  EXPECT_FALSE(good.has_error());
  EXPECT_TRUE(bad.has_error());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(good.wait(), 5);
    EXPECT_EQ(thrown_by([&] { bad.wait(); }), "no luck");
  }
  EXPECT_THROW(good.set(6), StateError);
  EXPECT_THROW(bad.set(6), StateError);
  EXPECT_THROW(good.set_error(problem("late")), StateError);
  EXPECT_EQ(good.wait(), 5);
}

// spec: test_callback_chain, test_callback_with_ret, test_callback_none
TEST(Futures, ThenMakesAChain) {
  const Future<int> first;
  Future<int> last = first;
  for (int i = 0; i < 20; ++i) last = last.then([](const Future<int>& before) { return before.wait() + 1; });
  const Future<void> effect = last.then([](const Future<int>&) {});
  const Future<std::string> text = last.then([](const Future<int>& before) { return std::to_string(before.wait()); });
  EXPECT_FALSE(last.is_complete());
  first.set(1);
  EXPECT_EQ(last.wait(), 21);
  EXPECT_EQ(text.wait(), "21");
  effect.wait();
  EXPECT_EQ(first.wait(), 1);
  EXPECT_EQ(first.then([](Future<int> done) { return 2 * done.wait(); }).wait(), 2);
}

// spec: test_callback_with_error
TEST(Futures, WhatACallbackThrowsIsTheErrorOfItsResultAlone) {
  const Future<int> parent;
  const Future<int> child = parent.then([](const Future<int>&) -> int { throw StateError("in the callback"); });
  const Future<int> sees = child.then([](const Future<int>& failed) { return failed.has_error() ? 1 : 0; });
  parent.set(3);
  EXPECT_EQ(parent.wait(), 3);
  EXPECT_EQ(thrown_by([&] { child.wait(); }), "in the callback");
  EXPECT_EQ(sees.wait(), 1);
  // And an error of the parent goes down the chain unless somebody catches it.
  const Future<int> failed;
  const Future<int> after = failed.then([](const Future<int>& f) { return f.wait(); });
  failed.set_error(problem("first"));
  EXPECT_EQ(thrown_by([&] { after.wait(); }), "first");
}

// spec: test_add_done_callback
TEST(Futures, CallbacksForTheirEffectRunOnce) {
  const Future<int> future;
  int runs = 0;
  future.on_complete([&](const Future<int>& done) { runs += done.wait(); });
  future.on_complete([](const Future<int>&) { throw StateError("nobody hears this"); });
  EXPECT_EQ(runs, 0);
  future.set(4);
  EXPECT_EQ(runs, 4);
  future.on_complete([&](const Future<int>&) { ++runs; });
  EXPECT_EQ(runs, 5);
}

TEST(Futures, AFutureOfAFutureIsOne) {
  const Future<int> outer, inner;
  const Future<int> both = outer.then([inner](const Future<int>&) { return inner; });
  outer.set(1);
  EXPECT_FALSE(both.is_complete());
  inner.set(9);
  EXPECT_EQ(both.wait(), 9);
}

// spec: test_wait_all_with_partial_exception, test_wait_all_with_exception
TEST(Futures, WaitAllThrowsTheFirstErrorWithoutWaitingForTheRest) {
  const Future<int> never, good, bad;
  good.set(1);
  std::thread later([bad] {
    std::this_thread::sleep_for(10ms);
    bad.set_error(problem("the first"));
  });
  EXPECT_EQ(thrown_by([&] { wait_all(std::vector{never, good, bad}); }), "the first");
  later.join();
  EXPECT_EQ(wait_all(std::vector{good, good}), (std::vector<int>{1, 1}));
  EXPECT_EQ(wait_all(std::vector<Future<int>>{}), std::vector<int>{});
}

TEST(Futures, CollectAllWaitsForAll) {
  const Future<int> a, b;
  const auto all = collect_all(std::vector{a, b});
  a.set_error(problem("one failed"));
  EXPECT_FALSE(all.is_complete());
  b.set(2);
  const auto ended = all.wait();
  EXPECT_TRUE(ended[0].has_error());
  EXPECT_EQ(ended[1].wait(), 2);
}

TEST(Futures, WaitingHasADeadline) {
  const Future<int> never;
  EXPECT_THROW(never.wait(within(5ms)), StateError);
}

Future<int> doubled(Future<int> of) { co_return 2 * co_await of; }
Future<void> fails(Future<int> of) {
  co_await of;
  throw StateError("in the coroutine");
}

TEST(Futures, CanBeAwaitedInCoroutines) {
  const Future<int> first;
  const Future<int> twice = doubled(doubled(first));
  const Future<void> bad = fails(first);
  EXPECT_FALSE(twice.is_complete());
  first.set(3);
  EXPECT_EQ(twice.wait(), 12);
  EXPECT_EQ(thrown_by([&] { bad.wait(); }), "in the coroutine");
}

// ---- with agents

int64_t plus_one(int64_t x) { return x + 1; }
void raises() { throw StateError("expected error"); }
int64_t no_number(int64_t) { throw StateError("expected error"); }
std::latch* may_end = nullptr;
void waits() { may_end->wait(); }
int64_t in_callbacks(int64_t worker, int64_t x) {
  Agent agent = here();
  Future<int64_t> last = agent.call_async<plus_one>(worker, x);
  for (int i = 0; i < 10; ++i) {
    last = last.then([agent, worker](const Future<int64_t>& before) mutable {
      return agent.call_async<plus_one>(worker, before.wait());
    });
  }
  return last.wait();
}

const std::vector<Served> kServes{remote<plus_one>, remote<raises>, remote<no_number>, remote<waits>,
                                  remote<in_callbacks>};

// spec: test_callback_simple, test_callback_multi, test_callback_in_rpc
TEST(Futures, OfCallsHaveCallbacksToo) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const std::string to = next(agent);
    Future<int64_t> call = agent.call_async<plus_one>(to, 1);
    std::vector<Future<int64_t>> followers;
    followers.reserve(10);
    for (int i = 0; i < 10; ++i) followers.push_back(call.then([i](const Future<int64_t>& f) { return f.wait() + i; }));
    for (int i = 0; i < 10; ++i) EXPECT_EQ(followers[static_cast<size_t>(i)].wait(), 2 + i);
    EXPECT_EQ(call.wait(), 2);
    EXPECT_EQ(agent.call<in_callbacks>(to, (group.rank() + 2) % 4, 1), 12);
  });
}

// What holds of any future holds of one whose value comes from another worker.
// spec: test_future_done, test_future_done_exception, test_future_wait_twice
// spec: test_callback_chain, test_callback_with_ret, test_callback_with_error, test_add_done_callback
// spec: test_wait_all_with_exception, test_wait_all_with_partial_exception
TEST(Futures, OfCallsAreLikeOthers) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const std::string to = next(agent);
    const Future<int64_t> good = agent.call_async<plus_one>(to, 1);
    const Future<void> bad = agent.call_async<raises>(to);
    EXPECT_EQ(good.wait(), 2);
    EXPECT_EQ(good.wait(), 2);
    for (int i = 0; i < 2; ++i) EXPECT_THAT(text_of(RpcErrorKind::kRemote, [&] { bad.wait(); }), HasSubstr("expected"));
    EXPECT_TRUE(good.is_complete() && bad.is_complete());
    EXPECT_TRUE(bad.has_error() && !good.has_error());
    const Future<int64_t> told = bad.then([](const Future<void>& f) -> int64_t {
      EXPECT_TRUE(f.has_error());
      return text_of(RpcErrorKind::kRemote, [&] { f.wait(); }).find("expected") == std::string::npos ? 0 : 1;
    });
    EXPECT_EQ(told.wait(), 1);
    Future<int64_t> last = agent.call_async<plus_one>(to, 0);
    for (int i = 0; i < 20; ++i) last = last.then([](const Future<int64_t>& f) { return f.wait() + 1; });
    EXPECT_EQ(last.wait(), 21);
    const Future<int64_t> broken =
        last.then([](const Future<int64_t>&) -> int64_t { throw StateError("in the callback"); });
    EXPECT_THROW(broken.wait(), StateError);
    EXPECT_EQ(last.wait(), 21);
    std::latch ran(1);
    agent.call_async<plus_one>(to, 1).on_complete([&](const Future<int64_t>&) { ran.count_down(); });
    ran.wait();
    std::vector<Future<int64_t>> calls{agent.call_async<plus_one>(to, 1), agent.call_async<no_number>(to, 1),
                                       agent.call_async<plus_one>(to, 2)};
    EXPECT_THAT(text_of(RpcErrorKind::kRemote, [&] { wait_all(calls); }), HasSubstr("expected"));
    EXPECT_EQ(calls[2].wait(), 3);
  });
}

// spec: test_wait_all, test_wait_all_multiple_call, test_wait_all_raise_in_user_func, test_wait_all_raise_in_body
// spec: test_wait_all_timeout, test_wait_all_exit_early_python, test_wait_all_exit_early_builtin
// spec: test_wait_all_exit_early_script_function
TEST(Futures, AScopeWaitsForTheCallsInIt) {
  std::latch end(1);
  may_end = &end;
  std::latch counted(4);
  comm::run_ranks(4, [&](comm::Group& group) {
    Agent agent(group, for_tests(kServes));
    const std::string to = next(agent);
    std::vector<Future<int64_t>> calls;
    agent.wait_all([&] {
      for (int i = 0; i < 20; ++i) calls.push_back(agent.call_async<plus_one>(to, i));
    });
    for (const auto& call : calls) EXPECT_TRUE(call.is_complete());
    EXPECT_THAT(text_of(RpcErrorKind::kRemote, [&] { agent.wait_all([&] { agent.call_async<raises>(to); }); }),
                HasSubstr("expected error"));
    // The list is gone also when the body throws.
    EXPECT_THROW(agent.wait_all([&] { throw InvalidArgument("in the body"); }), InvalidArgument);
    const Future<void> stuck = agent.call_async<waits>(to);
    agent.wait_all([&] { agent.call_async<plus_one>(to, 1); });
    EXPECT_FALSE(stuck.is_complete());
    // The first error does not wait for what is stuck.
    text_of(RpcErrorKind::kRemote, [&] {
      agent.wait_all([&] {
        agent.call_async<waits>(To(to).within(0s));
        agent.call_async<raises>(to);
      });
    });
    text_of(RpcErrorKind::kTimeout, [&] { agent.wait_all([&] { agent.call_async<waits>(To(to).within(5ms)); }); });
    counted.arrive_and_wait();
    if (group.rank() == 0) end.count_down();
    stuck.wait();
    agent.shutdown();
  });
}

}  // namespace
}  // namespace chorale::rpc
