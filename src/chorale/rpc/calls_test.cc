// Calls that are nested, many, late or go wrong; barriers and shutdown (spec/rpc-and-distributed-autograd.md, B4, B6).
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
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Kind = RpcErrorKind;
using served::add_ints;
using served::by_hand;
using served::chained;
using served::fan_out;
using served::nested;

Tensor plus(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor ones_plus(double x) { return add(ones({2, 2}), x); }
Tensor ref_plus(const RRef<Tensor>& a, double x) { return add(a.to_here(), x); }
void sleeps(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
std::string who_calls() { return caller().name; }
int64_t deep(int64_t depth) {
  if (depth == 0) return 0;
  Agent agent = here();
  return 1 + agent.call<deep>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), depth - 1);
}
std::atomic<int> chain_ends{0};
void chain(int64_t ttl) {
  Agent agent = here();
  if (ttl == 0) {
    ++chain_ends;
    return;
  }
  agent.call_async<chain>((agent.info().id + 1) % static_cast<int64_t>(agent.workers().size()), ttl - 1);
}
std::vector<int64_t> numbers() {
  const ReferenceCounts c = here().debug().references;
  return {static_cast<int64_t>(c.owners), static_cast<int64_t>(c.forks)};
}
void ends_process() { raise(SIGKILL); }

// ---- functions that are answered later

Future<int64_t> later(int64_t a, int64_t b) { return here().call_async<add_ints>(caller(), a, b); }
Future<int64_t> as_coroutine(int64_t x) {
  Agent agent = here();
  const int64_t first = co_await agent.call_async<add_ints>(agent.info(), x, 1);
  const int64_t second = co_await agent.call_async<add_ints>(agent.info(), first, 1);
  co_return first* second;
}
Future<int64_t> raises_later(int64_t x) {
  if (x == 0) throw StateError("before the future");
  Future<int64_t> future;
  future.set_error(std::make_exception_ptr(StateError("in the future")));
  return future;
}
std::vector<std::pair<std::string, Future<void>>> waiting;
std::mutex waiting_mutex;
Future<void> waits_without_a_thread() {
  const std::lock_guard lock(waiting_mutex);
  waiting.emplace_back(here().info().name, Future<void>());
  return waiting.back().second;
}
void let_go() {
  const std::lock_guard lock(waiting_mutex);
  for (auto& [worker, future] : waiting) {
    if (worker == here().info().name && !future.is_complete()) future.set();
  }
}

const std::vector<Served> kServes{remote<plus>,
                                  remote<ones_plus>,
                                  remote<ref_plus>,
                                  remote<add_ints>,
                                  remote<sleeps>,
                                  remote<who_calls>,
                                  remote<deep>,
                                  remote<chain>,
                                  remote<numbers>,
                                  remote<later>,
                                  remote<by_hand>,
                                  remote<chained>,
                                  remote<nested>,
                                  remote<fan_out>,
                                  remote<as_coroutine>,
                                  remote<raises_later>,
                                  remote<waits_without_a_thread>,
                                  remote<let_go>,
                                  remote<ends_process>};

std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

// spec: test_expected_src
TEST(Calls, KnowTheirCaller) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    EXPECT_EQ(agent.call<who_calls>(next(agent)), agent.info().name);
    EXPECT_THROW(here(), StateError);
  });
}

// spec: test_nested_rpc, test_stress_light_rpc, test_stress_heavy_rpc
TEST(Calls, OfAllAtOnceAreAllRight) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    EXPECT_EQ(agent.call<deep>(next(agent), 3), 3);
    std::vector<Future<int64_t>> light;
    for (int64_t i = 0; i < 1000; ++i) light.push_back(agent.call_async<add_ints>(next(agent), i, group.rank()));
    for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(light[static_cast<size_t>(i)].wait(), i + group.rank());
    std::vector<Future<Tensor>> heavy;
    const Tensor x = full({100, 100}, group.rank(), DType::kF32);
    heavy.reserve(20);
    for (int i = 0; i < 20; ++i)
      heavy.push_back(agent.call_async<plus>(next(agent), x, full({100, 100}, i, DType::kF32)));
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(values(heavy[static_cast<size_t>(i)].wait()),
                std::vector<float>(10'000, static_cast<float>(group.rank() + i)));
    }
  });
}

TEST(Calls, NestedDeeperThanThereAreThreadsDoNotStarve) {
  AgentOptions options = for_tests(kServes);
  options.threads = 4;
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    if (group.rank() > 0) return;
    EXPECT_EQ(agent.call<deep>(next(agent), 30), 30);
  });
}

// spec: test_multi_layer_nested_async_rpc
TEST(Calls, ThatNobodyWaitsForAreFinishedBeforeShutdownEnds) {
  chain_ends = 0;
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) { agent.call_async<chain>(next(agent), 20); });
  EXPECT_EQ(chain_ends, 4);
}

// spec: test_wait_all_workers_dense, test_wait_all_workers_twice_dense, test_graceful_shutdown_with_uneven_workload
TEST(Calls, AreServedByWorkersThatWaitForTheEnd) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    agent.barrier();
    agent.barrier();
    if (group.rank() != 0) return;  // these are in shutdown already
    for (const char* to : {"worker1", "worker2"}) {
      std::vector<Future<Tensor>> calls;
      calls.reserve(30);
      for (int i = 0; i < 30; ++i)
        calls.push_back(agent.call_async<plus>(to, ones({100}), full({100}, i, DType::kF32)));
      for (int i = 0; i < 30; ++i)
        EXPECT_EQ(values(calls[static_cast<size_t>(i)].wait()), std::vector<float>(100, static_cast<float>(1 + i)));
    }
  });
}

// spec: rpc:test_all_gather
TEST(Calls, WhatAllWorkersHaveCanBeGathered) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const std::map<std::string, int64_t> expected{{"worker0", 0}, {"worker1", 1}, {"worker2", 2}, {"worker3", 3}};
    EXPECT_EQ(agent.all_gather<int64_t>(group.rank()), expected);
  });
}

// spec: test_rpc_barrier_all, test_rpc_barrier_subset, test_rpc_barrier_multithreaded
TEST(Calls, BarriersOfDisjointSetsDoNotMeet) {
  std::atomic<int> even{0}, odd{0};
  run_agents(4, for_tests(kServes), [&](Agent& agent, comm::Group& group) {
    agent.barrier();
    const bool is_even = group.rank() % 2 == 0;
    std::atomic<int>& counter = is_even ? even : odd;
    ++counter;
    agent.barrier(is_even ? std::vector<std::string>{"worker0", "worker2"}
                          : std::vector<std::string>{"worker1", "worker3"});
    EXPECT_EQ(counter, 2);
    std::vector<std::thread> threads;
    threads.reserve(3);
    for (int i = 0; i < 3; ++i) threads.emplace_back([&] { agent.barrier(); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_THROW(agent.barrier({"worker0", "worker0"}), InvalidArgument);
    agent.barrier();
  });
}

// spec: test_wait_all_workers_timeout, test_shutdown_errors
TEST(Calls, AShutdownThatFailsIsOneAllTheSame) {
  std::latch timed_out(3);
  comm::run_ranks(4, [&](comm::Group& group) {
    {
      Agent agent(group, for_tests(kServes));
      if (group.rank() == 2) {
        timed_out.wait();  // it does not come
        agent.shutdown_now();
      } else if (group.rank() == 0) {
        EXPECT_THAT(
            text_of(Kind::kTimeout, 0, [&] { agent.shutdown(100ms); }),
            AllOf(HasSubstr("0.1 s"), HasSubstr("worker2"), Not(HasSubstr("worker1")), Not(HasSubstr("worker3"))));
        timed_out.count_down();
      } else {
        text_of(Kind::kTimeout, [&] { agent.shutdown(100ms); });
        timed_out.count_down();
      }
      EXPECT_FALSE(agent.is_running());
    }
    Agent again(group, for_tests(kServes));
    EXPECT_EQ(again.call<add_ints>(next(again), 1, 2), 3);
    again.shutdown();
  });
}

// spec: test_async_function_simple, test_async_function_with_future_ctor, test_async_function_chained
// spec: test_async_function_nested, test_async_function_multi_chained, test_async_function_multi_fanout
TEST(Calls, OfFunctionsThatFinishLaterAreAnsweredThen) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const std::string to = next(agent);
    EXPECT_EQ(agent.call<later>(to, 3, 4), 7);
    EXPECT_EQ(agent.call_async<by_hand>(to, 4).wait(), 8);
    EXPECT_EQ(agent.remote<chained>(to, 1).to_here(), 12);
    EXPECT_EQ(agent.call<nested>(to, 2), 13);
    std::vector<Future<int64_t>> many;
    for (int64_t i = 0; i < 20; ++i) many.push_back(agent.call_async<chained>(to, i));
    for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(many[static_cast<size_t>(i)].wait(), i + 11);
    EXPECT_EQ(agent.call<fan_out>(to, 20), 190);
    EXPECT_EQ(agent.call<as_coroutine>(to, 4), 30);
  });
}

// spec: test_async_function_raise, test_async_function_raise_async, test_async_function_raise_remote
TEST(Calls, OfFunctionsThatFinishLaterMayFail) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call<raises_later>(there, 0); }),
                HasSubstr("before the future"));
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call_async<raises_later>(there, 1).wait(); }),
                HasSubstr("in the future"));
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.remote<raises_later>(there, 1).to_here(); }),
                HasSubstr("in the future"));
  });
}

TEST(Calls, OfFunctionsThatFinishLaterTakeNoThread) {
  AgentOptions options = for_tests(kServes);
  options.threads = options.most_threads = 2;
  {
    const std::lock_guard lock(waiting_mutex);
    waiting.clear();
  }
  run_agents(4, options, [](Agent& agent, comm::Group&) {
    std::vector<Future<void>> calls;
    calls.reserve(50);
    for (int i = 0; i < 50; ++i) calls.push_back(agent.call_async<waits_without_a_thread>(next(agent)));
    EXPECT_EQ(agent.call<add_ints>(next(agent), 1, 2), 3);
    agent.barrier();
    for (const auto& call : calls) EXPECT_FALSE(call.is_complete());
    agent.call<let_go>(next(agent));
    wait_all(calls);
  });
}

// spec: test_handle_send_exceptions
TEST(Calls, OfAWorkerThatIsGoneFailByName) {
  comm::run_ranks(4, [](comm::Group& group) {
    Agent agent(group, for_tests(kServes));
    if (group.rank() == 1) {
      agent.barrier();
      agent.shutdown_now();
      return;
    }
    agent.barrier();
    const std::string text = text_of(Kind::kConnection, 1, [&] {
      for (int i = 0; i < 1000; ++i) {
        agent.call_async<add_ints>(To(1).within(10s), 1, 2).wait();
        std::this_thread::sleep_for(1ms);
      }
    });
    EXPECT_THAT(text, HasSubstr("rank 1"));
    agent.shutdown_now();
  });
}

TEST(Calls, OfAWorkerThatDiesFailWithinASecond) {
  const std::vector<int> ends = run_agent_processes(3, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    agent.barrier();
    if (group.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(text_of(Kind::kConnection, 1, [&] { agent.call<ends_process>(1); }), HasSubstr("'worker1'"));
      EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
      EXPECT_EQ(agent.call<add_ints>(2, 1, 2), 3);  // the others go on
      agent.call_async<sleeps>(2, 0).wait();
      agent.call_async<let_go>(2).wait();
    }
    if (group.rank() != 1) agent.barrier({"worker0", "worker2"});
    if (group.rank() == 1) std::this_thread::sleep_for(60s);
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0}));
}

// ---- faults on purpose

// spec: test_check_failed_messages
TEST(Faults, ControlMessagesAreSentAgain) {
  AgentOptions options = for_tests(kServes);
  options.faults.fail = Faults::retried();
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      const RRef<Tensor> a = agent.remote<ones_plus>(1, 1);
      EXPECT_EQ(values(agent.remote<ref_plus>(2, a, 1).to_here()), std::vector<float>(4, 3));
    }
    agent.barrier();
    expect_soon("nothing is left", [&] { return agent.debug().references.owners == 0; });
  });
}

// spec: test_verify_backend_options, test_custom_faulty_messages, test_no_faulty_messages
// spec: test_custom_messages_to_delay
TEST(Faults, AreAsTheOptionsSay) {
  const Faults usual = Faults::usual();
  EXPECT_EQ(usual.times, 3);
  EXPECT_EQ(usual.fail, (std::set{MessageKind::kForkRequest, MessageKind::kChildAccept, MessageKind::kUserDelete,
                                  MessageKind::kCleanup}));
  EXPECT_EQ(usual.delay, (std::map<MessageKind, std::chrono::nanoseconds>{{MessageKind::kCall, 1500ms},
                                                                          {MessageKind::kOp, 1500ms}}));
  AgentOptions options = for_tests(kServes);
  options.backend = "faulty";
  comm::run_ranks(4, [&](comm::Group& group) {
    Agent agent(group, options);
    EXPECT_EQ(agent.debug().threads_configured, 8);
    const Tensor x = ones({2});
    text_of(Kind::kTimeout, [&] { agent.call<add_ints>(To(next(agent)).within(20ms), 1, 2); });
    text_of(Kind::kTimeout, [&] { agent.call_op(To(next(agent)).within(20ms), "add", {x, x}); });
    EXPECT_EQ(values(agent.remote<ones_plus>(next(agent), 1).to_here()), std::vector<float>(4, 2));
    group.barrier().wait();
    agent.shutdown_now();
  });
  // Other kinds, and none at all.
  options.faults.fail = {MessageKind::kCall};
  options.faults.times = 2;
  run_agents(4, options, [](Agent& agent, comm::Group&) {
    for (int i = 0; i < 2; ++i) text_of(Kind::kInjected, [&] { agent.call<add_ints>(next(agent), 1, 2); });
    EXPECT_EQ(agent.call<add_ints>(next(agent), 1, 2), 3);
  });
  EXPECT_TRUE(Faults().empty());
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const RRef<Tensor> there = agent.remote<ones_plus>(next(agent), 1);
    EXPECT_EQ(values(agent.call<ref_plus>(next(agent, 2), there, 1)), std::vector<float>(4, 3));
  });
}

// spec: test_remote_message_dropped_pickle, test_remote_message_dropped_pickle_to_self
// spec: test_builtin_remote_message_dropped_timeout, test_builtin_remote_message_dropped_timeout_to_self
// spec: test_udf_remote_message_dropped_timeout, test_udf_remote_message_dropped_timeout_to_self
TEST(Faults, AReferenceWhoseCallWasDroppedHasFailed) {
  AgentOptions options = for_tests(kServes);
  options.faults.fail = {MessageKind::kRemoteCall, MessageKind::kRemoteOp};
  options.faults.times = 1 << 20;
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    for (const int there : {(group.rank() + 1) % 4, group.rank()}) {
      const RRef<Tensor> a = agent.remote<ones_plus>(there, 1);
      const auto b = agent.remote_op(there, "add", {ones({2}), ones({2})});
      text_of(Kind::kReferenceFailed, there, [&] { a.to_here(); });
      text_of(Kind::kReferenceFailed, there, [&] { b.to_here(); });
      Writer writer(agent.core().get(), (group.rank() + 1) % 4);
      text_of(Kind::kReferenceFailed, there, [&] { write(writer, a); });
      for (const int to : {(group.rank() + 1) % 4, (group.rank() + 2) % 4}) {
        text_of(Kind::kReferenceFailed, there, [&] { agent.call<ref_plus>(to, a, 1); });
        text_of(Kind::kReferenceFailed, there, [&] { agent.remote<ref_plus>(to, a, 1); });
      }
    }
  });
}

// spec: test_rref_to_here_timeout
TEST(Faults, AFetchMayBeTooLateAndTheNextOneNot) {
  AgentOptions options = for_tests(kServes);
  options.faults.delay = {{MessageKind::kFetch, 50ms}};
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const RRef<Tensor> a = agent.remote<ones_plus>(there, 1);
    text_of(Kind::kTimeout, there, [&] { a.to_here(5ms); });
    EXPECT_EQ(values(a.to_here()), std::vector<float>(4, 2));
  });
}

// spec: test_udf_remote_message_delay_timeout, test_remote_message_builtin_delay_timeout
// spec: test_remote_message_script_delay_timeout
TEST(Faults, ALateCallMakesTheValueForNobody) {
  AgentOptions options = for_tests(kServes);
  options.check_leaks = false;
  options.faults.delay = {{MessageKind::kRemoteCall, 100ms}, {MessageKind::kFetch, 50ms}};
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const RRef<Tensor> a = agent.remote<ones_plus>(To(there).within(1ms), 1);
    text_of(Kind::kTimeout, there, [&] { a.created().wait(); });
    text_of(Kind::kReferenceFailed, there, [&] { a.to_here(); });
    const RRef<Tensor> b = agent.remote<ones_plus>(To(there).within(2s), 1);
    text_of(Kind::kTimeout, there, [&] { b.to_here(1ms); });
    expect_soon("both are there", [&] { return agent.call<numbers>(there) == std::vector<int64_t>{2, 2}; });
    agent.barrier();
  });
}

// The own worker reads a value without a message.
// spec: test_udf_remote_message_delay_timeout_to_self, test_remote_message_builtin_delay_timeout_to_self
// spec: test_remote_message_script_delay_timeout_to_self
TEST(Faults, ALateCallOfTheOwnWorkerMakesTheValueForNobody) {
  AgentOptions options = for_tests(kServes);
  options.faults.delay = {
      {MessageKind::kRemoteCall, 100ms}, {MessageKind::kRemoteOp, 100ms}, {MessageKind::kFetch, 50ms}};
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    const int own = group.rank();
    const RRef<Tensor> a = agent.remote<ones_plus>(To(own).within(1ms), 1);
    text_of(Kind::kTimeout, own, [&] { a.created().wait(); });
    text_of(Kind::kReferenceFailed, own, [&] { a.to_here(); });
    const RRef<std::vector<Tensor>> b = agent.remote_op(To(own).within(1ms), "add", {ones({2}), ones({2})});
    text_of(Kind::kTimeout, own, [&] { b.created().wait(); });
    text_of(Kind::kReferenceFailed, own, [&] { b.to_here(); });
    // Late, but not too late; and no limit of time holds for a value that is here.
    const RRef<Tensor> c = agent.remote<ones_plus>(To(own).within(30s), 1);
    EXPECT_EQ(c.to_here(1ms).to_vector<float>(), ones_plus(1).to_vector<float>());
    expect_soon("nothing is left", [&] { return agent.debug().references.forks == 0; });
  });
}

// spec: test_rpc_builtin_timeout, test_rpc_script_timeout
TEST(Faults, CallsMayBeTooLate) {
  AgentOptions options = for_tests(kServes);
  options.faults.delay = {{MessageKind::kCall, 60ms}, {MessageKind::kOp, 60ms}};
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    text_of(Kind::kTimeout, there, [&] { agent.call<add_ints>(To(there).within(10ms), 1, 2); });
    text_of(Kind::kTimeout, there, [&] { agent.call_op(To(there).within(10ms), "add", {ones({2}), ones({2})}); });
    EXPECT_EQ(agent.call<add_ints>(there, 1, 2), 3);
    agent.set_timeout(1ms);
    text_of(Kind::kTimeout, there, [&] { agent.call<add_ints>(there, 1, 2); });
    EXPECT_EQ(agent.call<add_ints>(To(there).within(0s), 1, 2), 3);
    agent.barrier();
  });
}

}  // namespace
}  // namespace chorale::rpc
