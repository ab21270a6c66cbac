// Calls between agents (spec/rpc-and-distributed-autograd.md, B4).
#include "chorale/rpc/agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/rpc/agents_test_util.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Kind = RpcErrorKind;

Tensor add_tensors(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor add_number(const Tensor& a, double b) { return add(a, b); }
int64_t add_ints(int64_t a, int64_t b) { return a + b; }
std::vector<Tensor> reversed(std::vector<Tensor> all, const std::map<std::string, Tensor>& more) {
  for (const auto& [name, x] : more) all.push_back(x);
  std::reverse(all.begin(), all.end());
  return all;
}
Tensor positions(const Tensor& x) { return nonzero(x); }
void nothing() {}
void throws(const std::string& text) { throw StateError(text); }
void passes_on(int64_t worker) { here().call<throws>(worker, std::string("on another worker")); }
struct Strange {};
void throws_strange() { throw Strange(); }
void sleeps(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
struct Statics {
  static int64_t twice(int64_t x) { return 2 * x; }
};
int64_t not_served() { return 1; }

std::pair<Tensor, std::vector<int64_t>> seen_and_back(const Tensor& part, const Tensor& copy) {
  return {part, {part.is_contiguous(), copy.is_contiguous(), part.to_vector<float>() == copy.to_vector<float>()}};
}

const std::vector<Served> kServes{remote<seen_and_back>, remote<add_tensors>,    remote<add_number>,
                                  remote<add_ints>,      remote<reversed>,       remote<positions>,
                                  remote<nothing>,       remote<throws>,         remote<throws_strange>,
                                  remote<sleeps>,        remote<Statics::twice>, remote<passes_on>};

Tensor counting(int64_t n, float from = 0) { return add(view(arange(0, n * n, 1, DType::kF32), {n, n}), from); }

// spec: test_worker_id, test_get_worker_infos
TEST(Agent, KnowsWhoIsThere) {
  run_agents(4, for_tests({}), [](Agent& agent, comm::Group& group) {
    EXPECT_EQ(agent.info(), (WorkerInfo{concat("worker", group.rank()), group.rank()}));
    EXPECT_EQ(agent.info(next(agent)).id, (group.rank() + 1) % 4);
    EXPECT_EQ(agent.workers().size(), 4u);
    EXPECT_EQ(agent.workers()[2], (WorkerInfo{"worker2", 2}));
    EXPECT_THAT(text_of(Kind::kUnknownWorker, [&] { agent.info("nobody"); }),
                AllOf(HasSubstr("'nobody'"), HasSubstr("worker0, worker1, worker2, worker3")));
  });
}

// spec: test_self_add, test_send_to_rank, test_int_callee, test_add_with_id
TEST(Agent, CallsByNameRankAndInfo) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const Tensor x = counting(3, static_cast<float>(group.rank())), y = counting(3);
    const auto expected = add(x, y).to_vector<float>();
    const int rank = (group.rank() + 1) % 4;
    for (const To& to : {To(next(agent)), To(rank), To(agent.info(rank)), To(agent.info()), To(group.rank())}) {
      EXPECT_EQ(agent.call<add_tensors>(to, x, y).to_vector<float>(), expected);
      EXPECT_EQ(agent.call_async<add_tensors>(to, x, y).wait().to_vector<float>(), expected);
      EXPECT_EQ(agent.remote<add_tensors>(to, x, y).to_here().to_vector<float>(), expected);
    }
    text_of(Kind::kUnknownWorker, [&] { agent.call<nothing>(5); });
    text_of(Kind::kUnknownWorker, [&] { agent.call<nothing>(-1); });
    static_assert(!std::is_constructible_v<To, double> && !std::is_constructible_v<To, bool>);
  });
}

// spec: test_add, test_scalar_add, test_async_add, test_nonzero, test_multi_rpc, test_py_tensors
// spec: test_py_tensors_multi_async_call, test_py_tensors_in_container
TEST(Agent, ResultsAreExactForManySizes) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const int64_t n = group.rank() + 1;
    const std::string to = next(agent);
    EXPECT_EQ(agent.call<add_tensors>(to, counting(n), counting(n)).to_vector<float>(),
              mul(counting(n), 2).to_vector<float>());
    EXPECT_EQ(agent.call<add_number>(to, counting(n), 3).to_vector<float>(), counting(n, 3).to_vector<float>());
    EXPECT_EQ(agent.call<positions>(to, counting(n)).to_vector<int64_t>(), nonzero(counting(n)).to_vector<int64_t>());
    EXPECT_EQ(agent.call_op(to, "add", {counting(n), counting(n)}).to_vector<float>(),
              mul(counting(n), 2).to_vector<float>());
    std::vector<Future<Tensor>> futures;
    for (int64_t i = 0; i < 100; ++i) futures.push_back(agent.call_async<add_number>(to, counting(i), i));
    for (int64_t i = 0; i < 100; ++i) {
      const Tensor x = futures[static_cast<size_t>(i)].wait();
      EXPECT_EQ(x.sizes(), (Shape{i, i}));
      EXPECT_EQ(x.to_vector<float>(), counting(i, static_cast<float>(i)).to_vector<float>());
    }
    const auto all = agent.call<reversed>(to, std::vector{counting(2), counting(3)},
                                          std::map<std::string, Tensor>{{"a", counting(1, 5)}, {"b", counting(4)}});
    ASSERT_EQ(all.size(), 4u);
    EXPECT_EQ(all[0].to_vector<float>(), counting(4).to_vector<float>());
    EXPECT_EQ(all[1].to_vector<float>(), counting(1, 5).to_vector<float>());
    EXPECT_EQ(all[3].to_vector<float>(), counting(2).to_vector<float>());
  });
}

// spec: test_py_built_in, test_py_user_defined, test_py_no_return_result, test_py_class_static_method
TEST(Agent, RunsFunctionsOfAllKinds) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const std::string to = next(agent);
    EXPECT_EQ(agent.call<add_ints>(to, 3, 4), 7);
    agent.call<nothing>(to);
    agent.remote<nothing>(to).to_here();
    EXPECT_EQ(agent.call<Statics::twice>(to, 21), 42);
  });
}

// spec: test_non_cont_tensors
TEST(Agent, ViewsArriveAndComeBackAsViews) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const Tensor base = counting(5, static_cast<float>(group.rank())), part = narrow(base, 1, 2, 2);
    const Tensor copy = clone(part);
    ASSERT_FALSE(part.is_contiguous());
    const auto [there, sums] = agent.call<seen_and_back>(next(agent), part, copy);
    EXPECT_EQ(sums, (std::vector<int64_t>{0, 1, 1}));  // a view, a copy, and they are equal
    EXPECT_FALSE(there.is_contiguous());
    EXPECT_EQ(there.to_vector<float>(), part.to_vector<float>());
  });
}

// spec: test_py_function_exception, test_py_raise_in_user_func, test_py_raise_in_user_func_escaped_str
// spec: test_custom_exception_throw_during_reconstruction
TEST(Agent, WhatAFunctionThrowsArrivesWithItsTextTypeAndWorker) {
  const std::string text = "first line\nsecond \"line\" \\n\ttab";
  testing::internal::CaptureStderr();
  run_agents(4, for_tests(kServes), [&](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call<throws>(there, text); }),
                AllOf(HasSubstr(text), HasSubstr("chorale::StateError"), HasSubstr(concat("worker", there))));
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call_async<throws>(there, text).wait(); }), HasSubstr(text));
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call<throws_strange>(there); }),
                HasSubstr("no std::exception"));
    // What another worker threw is in the log of that one.
    text_of(Kind::kRemote, (there + 1) % 4, [&] { agent.call<passes_on>(there, (there + 1) % 4); });
    EXPECT_EQ(agent.call<add_ints>(there, 1, 1), 2);
  });
  // The worker that has thrown it has logged it.
  const std::string log = testing::internal::GetCapturedStderr();
  for (int there = 0; there < 4; ++there) {
    const std::string line =
        concat("a call of worker 'worker", (there + 3) % 4, "' failed: [rpc] worker 'worker", there, "' threw ");
    for (const std::string& what : {"chorale::StateError: " + text, std::string("something that is no std::exception")})
      EXPECT_THAT(log, HasSubstr(line + what));
    const std::string relayed =
        concat("a call of worker 'worker", (there + 3) % 4, "' failed: [rpc] worker 'worker", (there + 1) % 4);
    EXPECT_THAT(log, Not(HasSubstr(relayed)));
  }
}

// spec: test_function_not_on_callee
TEST(Agent, AFunctionThatIsNotServedIsAnErrorThatListsWhatIs) {
  run_agents(4, for_tests({remote<add_ints>}), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    EXPECT_THAT(text_of(Kind::kUnknownFunction, there, [&] { agent.call<not_served>(there); }),
                AllOf(HasSubstr("not_served"), HasSubstr("add_ints(i64,i64) -> i64")));
    EXPECT_EQ(agent.call<add_ints>(there, 1, 1), 2);
  });
}

struct Point {
  double x = 0, y = 0;
  CHORALE_MESSAGE(Point, x, y)
};
double height(const Point& p) { return p.y; }
namespace of_another_program {
struct Point {
  int64_t y = 0;
  double x = 0;
  CHORALE_MESSAGE(Point, y, x)
};
double height(const Point& p) { return static_cast<double>(p.y); }
}  // namespace of_another_program

// A program that was built from other sources may ask for anything.
TEST(Agent, AFunctionOfOtherTypesIsAnErrorThatSaysWhichItHas) {
  run_agents(4, for_tests({remote<add_ints>, remote<height>}), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const auto asked = [&](Kind kind, const std::string& name, const std::string& signature, const Writer& arguments) {
      Writer writer;
      write(writer, name);
      write(writer, signature);
      writer.raw(arguments.payload.data(), arguments.payload.size());
      const Future<void> answered;
      agent.core()->request(there, {.kind = MessageKind::kCall, .payload = writer.payload}, {},
                            [answered](const Message&, const std::exception_ptr& error) {
                              error ? answered.set_error(error) : answered.set();
                            });
      return text_of(kind, [&] { answered.wait(); });
    };
    Writer one, two, three;
    write<int64_t>(one, 1);
    write<double>(two, 1), write<double>(two, 2);
    for (int64_t i = 0; i < 3; ++i) write(three, i);
    const std::string ints = detail::function_name<add_ints>(), heights = detail::function_name<height>();
    EXPECT_THAT(asked(Kind::kWrongArguments, ints, "(f64,f64) -> i64", two),
                AllOf(HasSubstr("serves " + ints + "(i64,i64) -> i64,"), HasSubstr("asked for " + ints + "(f64,f64)")));
    asked(Kind::kWrongArguments, ints, "(i64) -> i64", one);
    asked(Kind::kWrongArguments, ints, "(i64,i64,i64) -> i64", three);
    const std::string other = remote<of_another_program::height>.signature();
    EXPECT_EQ(other, "(Point{i64,f64}) -> f64");
    EXPECT_THAT(asked(Kind::kWrongArguments, heights, other, two), HasSubstr("(Point{f64,f64}) -> f64"));
    // The types are right, and what follows is not of them.
    EXPECT_THAT(asked(Kind::kRemote, ints, "(i64,i64) -> i64", one), HasSubstr("ends early"));
    EXPECT_THAT(asked(Kind::kRemote, ints, "(i64,i64) -> i64", three), HasSubstr("were not read"));
    EXPECT_EQ(agent.call<add_ints>(there, 1, 1), 2);
    EXPECT_EQ(agent.call<height>(there, Point{1, 4}), 4);
  });
}

// spec: test_op_with_invalid_args
TEST(Agent, AnOpWithoutItsInputsIsAnError) {
  run_agents(4, for_tests({}), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    EXPECT_THAT(text_of(Kind::kRemote, there, [&] { agent.call_op(there, "add", {}); }), HasSubstr("op 'add' takes"));
    text_of(Kind::kUnknownFunction, there, [&] { agent.call_op(there, "no such op", {}); });
    EXPECT_EQ(agent.call_op(there, "matmul", {counting(2), counting(2)}).to_vector<float>(),
              (std::vector<float>{2, 3, 6, 11}));
  });
}

// spec: test_world_size_one
TEST(Agent, AloneCallsItself) {
  AgentOptions options = for_tests(kServes);
  options.name = "me";
  run_agents(1, options, [](Agent& agent, comm::Group&) {
    const Tensor x = counting(4);
    const auto expected = mul(x, 2).to_vector<float>();
    EXPECT_EQ(agent.call<add_tensors>("me", x, x).to_vector<float>(), expected);
    EXPECT_EQ(agent.call_async<add_tensors>("me", x, x).wait().to_vector<float>(), expected);
    EXPECT_EQ(agent.remote<add_tensors>("me", x, x).to_here().to_vector<float>(), expected);
  });
}

// spec: test_invalid_names
TEST(Agent, NamesMustBeGood) {
  const std::pair<std::string, std::string> names[] = {{"abc*", "its characters must be"},
                                                       {" ", "its characters must be"},
                                                       {"", "empty"},
                                                       {std::string(500, 'a'), "128"}};
  for (const auto& [name, flaw] : names) {
    comm::run_ranks(4, [name = name, flaw = flaw](comm::Group& group) {
      AgentOptions options;
      options.name = group.rank() == 1 ? name : concat("good", group.rank());
      EXPECT_THAT(text_of(Kind::kBadName, 1, [&] { Agent agent(group, options); }), HasSubstr(flaw));
      options.name = concat("right-_:", group.rank());
      Agent(group, options).shutdown();
    });
  }
}

// spec: test_duplicate_name, test_duplicate_name_2
TEST(Agent, TwoWorkersOfOneNameAreAnErrorForBoth) {
  comm::run_ranks(4, [](comm::Group& group) {
    AgentOptions options;
    options.name = group.rank() % 2 == 1 ? concat("other", group.rank()) : "same";
    EXPECT_THAT(text_of(Kind::kDuplicateName, 2, [&] { Agent agent(group, options); }),
                HasSubstr("workers 0 and 2 are both called 'same'"));
  });
}

// spec: test_shutdown_followed_by_rpc
TEST(Agent, AfterShutdownNothingCanBeCalled) {
  comm::run_ranks(4, [](comm::Group& group) {
    Agent agent(group, for_tests(kServes));
    agent.call<nothing>(next(agent));
    agent.shutdown();
    text_of(Kind::kNotRunning, [&] { agent.call<nothing>(next(agent)); });
    text_of(Kind::kNotRunning, [&] { agent.remote<nothing>(next(agent)); });
    // Another one can be made.
    Agent again(group, for_tests(kServes));
    EXPECT_EQ(again.call<add_ints>(next(again), 1, 2), 3);
    again.shutdown();
  });
}

// spec: test_local_shutdown, test_local_shutdown_with_rpc
TEST(Agent, CanBeShutDownWithoutWaitingForOthers) {
  comm::run_ranks(4, [](comm::Group& group) {
    Agent agent(group, for_tests(kServes));
    if (group.rank() == 0) agent.call<add_ints>("worker1", 1, 2);
    if (group.rank() > 0) group.barrier().wait();  // worker 0 leaves first
    agent.shutdown_now();
    EXPECT_FALSE(agent.is_running());
    if (group.rank() == 0) group.barrier().wait();
  });
}

// spec: test_default_timeout_used, test_set_and_get_default_rpc_timeout, test_rpc_timeouts
TEST(Agent, ObeysTimeouts) {
  comm::run_ranks(4, [](comm::Group& group) {
    AgentOptions options = for_tests(kServes);
    options.timeout = 50ms;
    Agent agent(group, options);
    const int there = (group.rank() + 1) % 4;
    EXPECT_EQ(agent.timeout(), 50ms);
    EXPECT_THAT(text_of(Kind::kTimeout, there, [&] { agent.call<sleeps>(there, 1000); }), HasSubstr("within 50 ms"));
    // A call's own limit wins; a call keeps the limit it was started with.
    EXPECT_THAT(text_of(Kind::kTimeout, there, [&] { agent.call<sleeps>(To(there).within(1ms), 1000); }),
                HasSubstr("within 1 ms"));
    agent.call<sleeps>(To(there).within(0s), 100);
    const Future<void> before = agent.call_async<sleeps>(there, 1000);
    agent.set_timeout(200s);
    EXPECT_EQ(agent.timeout(), 200s);
    text_of(Kind::kTimeout, there, [&] { before.wait(); });
    agent.call<sleeps>(there, 100);
    agent.set_timeout(0s);
    agent.call<sleeps>(there, 100);
    EXPECT_THROW(agent.set_timeout(-1s), InvalidArgument);
    EXPECT_THROW(agent.call<nothing>(To(there).within(-1s)), InvalidArgument);
    agent.shutdown();
  });
}

TEST(Agent, RefusesOptionsThatMakeNoSense) {
  comm::run_ranks(1, [](comm::Group& group) {
    AgentOptions options;
    options.timeout = -1s;
    EXPECT_THROW(Agent(group, options), InvalidArgument);
  });
}

// spec: test_set_and_get_num_worker_threads
TEST(Agent, SaysHowManyThreadsItMayHave) {
  AgentOptions options = for_tests(kServes);
  options.threads = 27;
  run_agents(4, options, [](Agent& agent, comm::Group&) { EXPECT_EQ(agent.debug().threads_configured, 27); });
}

}  // namespace
}  // namespace chorale::rpc
