// Workers that join and leave while others work, ways to make agents, and objects whose type is asked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <csignal>
#include <latch>
#include <thread>

#include "chorale/rpc/backend.h"
#include "chorale/rpc/context_test_util.h"
#include "chorale/rpc/proxy.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::add_ints;

Tensor scaled(const Tensor& x, double factor) { return mul(x, factor); }
Tensor value_of(const RRef<Tensor>& x) { return x.to_here(); }
void sleeps_long(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

AgentOptions member(int id) {
  AgentOptions options = for_tests({remote<add_ints>, remote<scaled>, remote<value_of>, remote<sleeps_long>});
  options.id = id;
  return options;
}

// Calls, a reference and a gradient from one worker to another.
void expect_all_works(Agent& agent, const To& to, double seed) {
  EXPECT_EQ(agent.call<add_ints>(to, 40, 2), 42);
  const Tensor x = wanting(pattern({3, 3}, seed));
  EXPECT_EQ(agent.remote<scaled>(to, x, 3).to_here().to_vector<float>(), mul(x.alias(), 3).to_vector<float>());
  EXPECT_EQ(agent.call<value_of>(to, agent.reference(x.alias())).to_vector<float>(), x.to_vector<float>());
  Context context(agent);
  context.backward({sum(agent.call<scaled>(to, x, seed + 2))});
  EXPECT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(9, static_cast<float>(seed + 2)));
}

// spec: test_dynamic_rpc_init_rpc, test_dynamic_rpc_new_rank_can_communicated_with_existing_rank
// spec: test_dynamic_rpc_existing_rank_can_communicate_with_new_rank
TEST(DynamicGroups, WorkersComeOneAfterTheOtherAndCallEachOther) {
  const auto store = std::make_shared<transport::MemoryStore>();
  constexpr int kWorkers = 4;
  std::barrier step(kWorkers);
  std::vector<std::thread> threads;
  threads.reserve(kWorkers);
  for (int rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      for (int turn = 0; turn < rank; ++turn) {
        step.arrive_and_wait();
        step.arrive_and_wait();
      }
      Agent agent(store, member(rank));
      EXPECT_EQ(agent.info().name, concat("worker", rank));
      EXPECT_EQ(agent.workers().size(), static_cast<size_t>(rank) + 1);
      for (int other = 0; other < rank; ++other) expect_all_works(agent, other, rank);  // the new one calls the others,
      for (int turn = rank; turn < kWorkers; ++turn) {
        step.arrive_and_wait();
        // and they call it: all know it when it has joined.
        if (turn > rank) expect_all_works(agent, concat("worker", turn), rank + turn);
        step.arrive_and_wait();
      }
      // The first leaves; the others go on. Then all leave, in any order.
      if (rank == 0) agent.shutdown();
      step.arrive_and_wait();
      if (rank > 0) {
        EXPECT_THAT(text_of(Kind::kUnknownWorker, [&] { agent.call<add_ints>("worker0", 1, 2); }),
                    HasSubstr("there are worker1, worker2, worker3"));
        expect_all_works(agent, 1 + rank % 3, rank);
      }
      step.arrive_and_wait();
      if (rank > 0) agent.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// spec: test_dynamic_rpc_init_rpc_without_rank
TEST(DynamicGroups, AWorkerSaysWhichNumberItHas) {
  const auto store = std::make_shared<transport::MemoryStore>();
  AgentOptions options;
  options.name = "alone";
  try {
    const Agent agent(store, options);
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("AgentOptions::id"));
  }
  options.id = -1;
  EXPECT_THROW(Agent(store, options), InvalidArgument);
  options.id = 3;
  options.name = "a*";
  text_of(Kind::kBadName, [&] { Agent(store, options); });
}

TEST(DynamicGroups, NamesAndNumbersAreTakenOnceAndAreFreeAfterwards) {
  const auto store = std::make_shared<transport::MemoryStore>();
  for (int round = 0; round < 2; ++round) {
    Agent agent(store, member(5));
    AgentOptions same_name = member(6);
    same_name.name = "worker5";
    EXPECT_THAT(text_of(Kind::kDuplicateName, 6, [&] { Agent(store, same_name); }), HasSubstr("'worker5'"));
    AgentOptions same_number = member(5);
    same_number.name = "other";
    EXPECT_THAT(text_of(Kind::kDuplicateName, 5, [&] { Agent(store, same_number); }), HasSubstr("worker 5"));
    EXPECT_EQ(agent.workers().size(), 1u);
    agent.shutdown();
  }
}

// spec: test_dynamic_and_static_init_rpc_together
TEST(DynamicGroups, TheTwoWaysToMakeAgentsDoNotMix) {
  const auto store = std::make_shared<transport::MemoryStore>();
  const auto text = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const StateError& error) {
      return error.what();
    }
    return "no error";
  };
  constexpr int kWorkers = 4;
  std::latch made(kWorkers);
  std::vector<std::thread> threads;
  threads.reserve(kWorkers);
  for (int rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      comm::World world(store, rank, kWorkers);
      {
        Agent agent(world, for_tests({remote<add_ints>}));
        made.arrive_and_wait();
        EXPECT_EQ(agent.call<add_ints>((rank + 1) % kWorkers, rank, 1), rank + 1);
        EXPECT_THAT(text([&] { Agent(store, member(kWorkers + rank)); }), HasSubstr("cannot use the same store"));
        agent.shutdown();
      }
      world.group().barrier().wait();
      Agent agent(store, member(rank));
      EXPECT_THAT(text([&] { Agent(world, for_tests({})); }), HasSubstr("cannot use the same store"));
      world.group().barrier().wait();
      agent.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A process that is killed: the calls that wait for it fail, its name is free, and the others go on.
TEST(DynamicGroups, OthersGoOnWhenAWorkerIsKilled) {
  const auto ends = comm::run_processes(3, [&](comm::Group& group) {
    std::optional<TemporaryFolder> folder;  // of the first, which is not killed
    const auto store = common_store(group, folder);
    const int rank = group.rank();
    for (int round = 0; round < 3; ++round) {
      Agent agent(store, member(10 * round + rank));
      expect_soon("all are there", [&] { return agent.workers().size() == 3; });
      expect_all_works(agent, 10 * round + (rank + 1) % 3, round);
      group.barrier().wait();
      if (round < 2) {
        agent.shutdown_now();
        group.barrier().wait();
        continue;
      }
      Future<void> waits;
      if (rank < 2) waits = agent.call_async<sleeps_long>(To(22).within(30s), 60000);
      group.barrier().wait();
      if (rank == 2) raise(SIGKILL);
      const std::string text = text_of(Kind::kConnection, 22, [&] { waits.wait(); });
      EXPECT_THAT(text, HasSubstr("worker22"));
      expect_soon("it is not there any more", [&] { return agent.workers().size() == 2; });
      expect_all_works(agent, 21 - rank, rank);
      agent.shutdown();
    }
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0, -SIGKILL}));
}

// ---- backends

// spec: test_register_rpc_backend_and_set_and_start_rpc_backend
TEST(Backends, AreRegisteredOnceAndMakeAgents) {
  static std::atomic<int> started{0};
  const auto start = [](const comm::Group& group, AgentOptions options) {
    ++started;
    options.backend = "group";
    options.threads = 3;
    return start_agent(group, std::move(options));
  };
  register_backend("of three threads", start);
  EXPECT_THAT(text_of(Kind::kDuplicateBackend, [&] { register_backend("of three threads", start); }),
              HasSubstr("'of three threads'"));
  text_of(Kind::kDuplicateBackend, [&] { register_backend("group", start); });
  AgentOptions options = for_tests({remote<add_ints>});
  options.backend = "of three threads";
  run_agents(4, options, [](Agent& agent, comm::Group&) {
    EXPECT_EQ(agent.debug().threads_configured, 3);
    EXPECT_EQ(agent.call<add_ints>(next(agent), 1, 2), 3);
  });
  EXPECT_EQ(started, 4);
  options.backend = "none";
  comm::run_ranks(1, [&](comm::Group& group) {
    try {
      const Agent refused(group, options);
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("there are faulty, group, of three threads"));
    }
  });
}

// ---- objects whose type is asked for

struct Tally {
  explicit Tally(int64_t start) : value(start) {}
  int64_t plus(int64_t x) { return value += x; }
  Future<int64_t> later(int64_t x) { return ready<int64_t>(value + x); }
  void waits(int64_t ms) { sleeps_long(ms); }
  int64_t value;
};
struct Idle {
  int64_t nothing() { return 0; }
};
Tally slow_tally(int64_t ms) {
  sleeps_long(ms);
  return Tally(1);
}
Tally failing_tally() { throw StateError("no tally today"); }
// A function: not every compiler has made what it lists before a variable that begins with it.
std::vector<Served> objects() {
  return {remote<&Tally::plus>,   remote<&Tally::later>,        remote<&Tally::waits>,
          remote<&Idle::nothing>, remote<make<Tally, int64_t>>, remote<make<Idle>>,
          remote<slow_tally>,     remote<failing_tally>,        remote<scaled>,
          remote<&Tensor::elems>};
}

// spec: test_rref_proxy_{tensor,tensor_self,reuse,class,class_self,non_exist,timeout}
TEST(Proxies, CallMethodsOfObjectsWhoseTypeTheyAskFor) {
  run_agents(4, for_tests(objects()), [](Agent& agent, comm::Group&) {
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      Proxy counter(agent, agent.remote<make<Tally, int64_t>>(to, 10));
      EXPECT_EQ(counter.call<&Tally::plus>(2), 12);
      EXPECT_EQ(counter.call_async<&Tally::plus>(5).wait(), 17);
      EXPECT_EQ(counter.remote<&Tally::plus>(7).to_here(), 24);
      EXPECT_EQ(counter.call<&Tally::later>(1), 25);
      Proxy tensor(agent, agent.remote<scaled>(to, pattern({3, 4}, 1), 2));
      EXPECT_EQ(tensor.call<&Tensor::elems>(), 12);
      EXPECT_THAT(text_of(Kind::kUnsupported, [&] { counter.call<&Idle::nothing>(); }), HasSubstr("has no methods of"));
      EXPECT_THAT(text_of(Kind::kUnsupported, [&] { counter.remote<&Idle::nothing>(); }), HasSubstr("Tally"));
      Proxy hasty(agent, agent.remote<make<Tally, int64_t>>(to, 1), 20ms);
      text_of(Kind::kTimeout, [&] { hasty.call<&Tally::waits>(2000); });
    }
  });
}

// spec: test_rref_type_{,with_error_,owner_}{blocking,non_blocking}, test_rref_type_slow_init
TEST(Proxies, TheTypeIsAskedOnceAndAllShareTheAnswer) {
  run_agents(4, for_tests(objects()), [](Agent& agent, comm::Group&) {
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      const RRef<Tally> there = agent.remote<slow_tally>(to, 200);
      expect_soon("the call is on its way", [&] { return agent.debug().requests > 0; });
      const int64_t before = agent.debug().requests;
      const Future<std::string> first = there.type_async();
      std::vector<std::thread> askers;
      askers.reserve(4);
      for (int i = 0; i < 4; ++i)
        askers.emplace_back([&] {
          const Future<std::string> again = there.type_async();
          EXPECT_EQ(again.state(), first.state());
          EXPECT_EQ(again.wait(), value_type<Tally>().name);
        });
      for (std::thread& asker : askers) asker.join();
      EXPECT_EQ(there.type(), value_type<Tally>().name);
      EXPECT_LE(agent.debug().requests, before + 1);
      const RRef<Tally> failed = agent.remote<failing_tally>(to);
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(text_of(Kind::kRemote, [&] { failed.type(); }), HasSubstr("no tally today"));
        EXPECT_THAT(text_of(Kind::kRemote, [&] { failed.type_async().wait(); }), HasSubstr("no tally today"));
      }
    }
    const RRef<Tally> slow = agent.remote<slow_tally>(next(agent), 300);
    text_of(Kind::kTimeout, [&] { slow.type(10ms); });
    EXPECT_EQ(slow.type(0s), value_type<Tally>().name);  // what failed is asked again
    const RRef<int64_t> own = agent.reference<int64_t>(3);
    EXPECT_EQ(own.type(), value_type<int64_t>().name);
  });
}

}  // namespace
}  // namespace chorale::rpc
