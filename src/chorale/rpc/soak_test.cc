// What must hold for long, in any order of messages, and while workers come and are killed. CHORALE_SOAK=1 makes it
// long (docs/dev/testing.md).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <thread>

#include "chorale/rpc/context_test_util.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using testing::HasSubstr;
using Kind = RpcErrorKind;
using served::add_ints;

Tensor filled(double value) { return mul(ones({4}), value); }
double first_of(const RRef<Tensor>& x) { return select(x.to_here(), 0, 0).item<double>(); }
// Reads it from a worker that is neither the owner nor the caller.
double first_of_on(const RRef<Tensor>& x, int64_t worker) { return here().call<first_of>(worker, x); }
std::vector<RRef<Tensor>> made_on(int64_t worker, double value) {
  return {here().remote<filled>(worker, value), here().reference(filled(value + 1))};
}
// The first element, and how many others are not equal to it.
std::pair<double, int64_t> look_at(const Tensor& x) {
  const auto values = x.to_vector<float>();
  return {values[0], static_cast<int64_t>(values.size()) - std::count(values.begin(), values.end(), values[0])};
}
std::mutex memory_mutex;
std::vector<std::pair<double, int64_t>> memory(2);
void remember(const Tensor& x, int64_t place) {
  const std::lock_guard lock(memory_mutex);
  memory.at(static_cast<size_t>(place)) = look_at(x);
}
std::vector<std::pair<double, int64_t>> remembered() {
  const std::lock_guard lock(memory_mutex);
  return memory;
}
Tensor same_large(const Tensor& x) { return x; }
int64_t process_here() { return getpid(); }
Tensor tripled(const Tensor& x) { return mul(x, 3); }

// What a process takes: bytes of memory, open descriptors.
struct Taken {
  int64_t memory = 0, descriptors = 0;
  CHORALE_MESSAGE(Taken, memory, descriptors)
};
Taken taken_here() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return {resident * sysconf(_SC_PAGESIZE), std::distance(begin(descriptors), end(descriptors))};
}

const std::vector<Served> kServes{remote<filled>,     remote<first_of>,   remote<first_of_on>,  remote<made_on>,
                                  remote<look_at>,    remote<same_large>, remote<process_here>, remote<tripled>,
                                  remote<taken_here>, remote<remember>,   remote<remembered>};

// ---- order and lifetimes

// References of all kinds are made, passed on in all directions and dropped, early and late.
void use_references(Agent& agent, int rank, std::mt19937& random) {
  const auto worker = [&](int step) { return (rank + step) % 4; };
  const double value = rank;
  agent.remote<filled>(worker(1), value);  // dropped at once
  std::vector<RRef<Tensor>> kept{agent.remote<filled>(worker(1), value), agent.remote<filled>(rank, value),
                                 agent.reference(filled(value))};
  std::vector<Future<double>> answers;
  for (const RRef<Tensor>& one : kept) {
    for (int step = 0; step < 4; ++step) answers.push_back(agent.call_async<first_of>(worker(step), one));
    answers.push_back(agent.call_async<first_of_on>(worker(2), one, worker(3)));
  }
  std::shuffle(kept.begin(), kept.end(), random);
  kept.resize(random() % kept.size());  // while calls with them are on their way
  const RRef<std::vector<RRef<Tensor>>> far = agent.remote<made_on>(worker(2), worker(3), 10);
  for (const auto& answer : answers) EXPECT_EQ(answer.wait(), value);
  const std::vector<RRef<Tensor>> brought = far.to_here();
  EXPECT_EQ(first_of(brought[0]), 10);
  EXPECT_EQ(agent.call<first_of>(worker(1), brought[1]), 11);
}

// A seed decides what is dropped when; those of the delays change every twenty of them, with the agents.
TEST(Order, ReferencesLiveAndEndAsTheyShouldUnderSeededDelays) {
  const int seeds = seeds_to_try(200, 5000);
  comm::run_ranks(4, [&](comm::Group& group) {
    for (int first = 0; first < seeds; first += 20) {
      AgentOptions options = for_context_tests(kServes);
      options.threads = 4;
      options.retry_after = 100us;
      options.faults = Faults::chaos(static_cast<uint64_t>(first) + 1, 200us);
      Agent agent(group, options);
      for (int seed = first; seed < first + 20; ++seed) {
        std::mt19937 random(static_cast<unsigned>(16 * seed + group.rank()));
        use_references(agent, group.rank(), random);
      }
      agent.shutdown();  // what is left would be an error
      const ReferenceCounts left = agent.debug().references;
      ASSERT_EQ(left.owners + left.forks + left.pending_users + left.pending_children, 0u) << "seed " << first;
    }
  });
}

// ---- tensors that are lent

// Returns when none of its threads runs any more.
void stop(pid_t process) {
  ASSERT_EQ(kill(process, SIGSTOP), 0);
  expect_soon("it has stopped", [&] {
    for (const auto& thread : std::filesystem::directory_iterator(concat("/proc/", process, "/task"))) {
      std::ifstream file(thread.path() / "stat");
      std::string text;
      std::getline(file, text);
      if (text.compare(text.rfind(')'), 3, ") T") != 0) return false;
    }
    return true;
  });
}

TEST(LentTensors, MayBeWrittenAsSoonAsACallHasReturned) {
  const auto ends = run_agent_processes(2, for_context_tests(kServes), [](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      const Tensor x = ones({1 << 18});
      const auto fill = [&](double value) { copy_(x, mul(ones({1 << 18}), value)); };
      for (int i = 1; i <= 20; ++i) {
        fill(i);
        const auto seen = agent.call_async<look_at>(1, x);
        fill(-1);
        EXPECT_EQ(seen.wait(), (std::pair<double, int64_t>(i, 0)));
      }
      // The same holds when the other one cannot read for a while.
      const auto other = static_cast<pid_t>(agent.call<process_here>(1));
      fill(50);
      stop(other);
      const auto seen = agent.call_async<look_at>(1, x);
      fill(60);
      const auto kept = agent.remote<same_large>(1, x);
      fill(-1);
      ASSERT_EQ(kill(other, SIGCONT), 0);
      EXPECT_EQ(seen.wait(), (std::pair<double, int64_t>(50, 0)));
      EXPECT_EQ(look_at(kept.to_here()), (std::pair<double, int64_t>(60, 0)));
      EXPECT_EQ(look_at(x), (std::pair<double, int64_t>(-1, 0)));
      // When a call was given up, what it was to read may be written, and be gone.
      stop(other);
      fill(70);
      text_of(Kind::kTimeout, 1, [&] { agent.call<remember>(To(1).within(5ms), x, 0); });
      fill(-1);
      text_of(Kind::kTimeout, 1, [&] { agent.call<remember>(To(1).within(5ms), mul(ones({1 << 18}), 80), 1); });
      const Tensor in_its_place = mul(ones({1 << 18}), -1);
      ASSERT_EQ(kill(other, SIGCONT), 0);
      const std::vector<std::pair<double, int64_t>> expected{{70, 0}, {80, 0}};
      expect_soon("the calls have run", [&] { return agent.call<remembered>(1) == expected; });
    }
    agent.shutdown();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

// A message that leaves late has the values that its tensors had when the call returned.
TEST(LentTensors, MayBeWrittenWhileAMessageIsLate) {
  AgentOptions options = for_context_tests(kServes);
  options.faults.most_delay = 5ms;
  run_agents(2, options, [](Agent& agent, comm::Group& group) {
    if (group.rank() > 0) return;
    for (const int64_t size : {4, 1 << 18}) {
      const Tensor x = ones({size});
      for (int i = 1; i <= 10; ++i) {
        fill_(x, i);
        const auto seen = agent.call_async<look_at>(1, x);
        fill_(x, -1);
        EXPECT_EQ(seen.wait(), (std::pair<double, int64_t>(i, 0))) << size;
      }
    }
  });
}

// ---- faults in the group below

TEST(ChaosBelow, ReachesCalls) {
  const auto calls = [](Agent& agent) {
    for (int64_t i = 0; i < 200; ++i) EXPECT_EQ(agent.call<add_ints>(1, i, 1), i + 1);
  };
  // Late and stalling workers change nothing,
  auto ends = comm::run_processes(
      2,
      [&](comm::Group& group) {
        Agent agent(group, for_context_tests(kServes));
        if (group.rank() == 0) calls(agent);
        agent.shutdown();
      },
      {.timeout = 60s, .chaos = "delay@rank=0,call=20,ms=30;stall@rank=1,call=40,ms=30;delay@rank=1,call=60,ms=30"});
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
  // and one that is killed in the middle of them is named.
  ends =
      comm::run_processes(2,
                          [&](comm::Group& group) {
                            Agent agent(group, for_context_tests(kServes));
                            if (group.rank() == 0) {
                              EXPECT_THAT(text_of(Kind::kConnection, 1, [&] { calls(agent); }), HasSubstr("'worker1'"));
                              agent.shutdown_now();
                            } else {
                              std::this_thread::sleep_for(60s);
                            }
                          },
                          {.timeout = 60s, .chaos = "kill@rank=1,call=100"});
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL}));
}

// ---- for long

// Calls and references between two processes; what they take does not grow.
TEST(Soak, CallsAndReferencesLeaveNothing) {
  const int64_t rounds = soaking() ? 1000 : 10, calls = soaking() ? 1000 : 200, references = soaking() ? 100 : 20;
  const auto ends = run_agent_processes(2, for_context_tests(kServes), [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) {
      std::array<Taken, 2> before;
      for (int64_t round = 0; round < rounds; ++round) {
        for (int64_t i = 0; i < calls; i += 20) {
          std::vector<Future<int64_t>> some;
          some.reserve(20);
          for (int64_t j = 0; j < 20; ++j) some.push_back(agent.call_async<add_ints>(1, round, i + j));
          for (int64_t j = 0; j < 20; ++j) ASSERT_EQ(some[static_cast<size_t>(j)].wait(), round + i + j);
        }
        for (int64_t i = 0; i < references; ++i) {
          const RRef<Tensor> there = agent.remote<filled>(1, static_cast<double>(i));
          ASSERT_EQ(agent.call<first_of>(i % 2, there), static_cast<double>(i));
        }
        if (round == rounds / 4) before = {taken_here(), agent.call<taken_here>(1)};
      }
      const std::array<Taken, 2> after{taken_here(), agent.call<taken_here>(1)};
      for (size_t worker = 0; worker < 2; ++worker) {
        SCOPED_TRACE(concat("worker ", worker));
        EXPECT_LE(after[worker].memory, before[worker].memory + (8 << 20));
        EXPECT_LE(after[worker].descriptors, before[worker].descriptors);
        if (soaking())
          std::cout << concat("worker ", worker, ": ", before[worker].memory >> 10, " KiB and ",
                              before[worker].descriptors, " descriptors after a quarter, ", after[worker].memory >> 10,
                              " KiB and ", after[worker].descriptors, " at the end\n");
      }
      expect_soon("no reference is left", [&] { return agent.debug().references.users == 0; });
    }
    agent.shutdown();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

// A worker with many connections.
TEST(Soak, ManyWorkersCallOne) {
  const int workers = soaking() ? 65 : 9;
  AgentOptions options = for_context_tests(kServes);
  options.threads = 2;
  run_agents(workers, options, [](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) return;
    for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(agent.call<add_ints>(0, group.rank(), i), group.rank() + i);
    EXPECT_EQ(agent.call<first_of>(0, agent.remote<filled>(0, 3.0)), 3);
  });
}

// Workers join, work and are killed, one after the other, while two go on with their calls, references and gradients.
TEST(Soak, OthersGoOnWhileWorkersComeAndAreKilled) {
  const int victims = soaking() ? 30 : 4;
  const auto life = soaking() ? 3s : std::chrono::seconds(0);
  const auto ends = comm::run_processes(2 + victims, [&](comm::Group& group) {
    std::optional<TemporaryFolder> folder;  // of the first, which is not killed
    const auto store = common_store(group, folder);
    const int rank = group.rank();
    AgentOptions options = for_context_tests(kServes);
    options.id = rank < 2 ? rank : 2 + rank % 2;  // numbers and names come again
    options.check_leaks = false;
    const std::string turn = "test/turn/";
    if (rank >= 2) {
      store->get(concat(turn, rank), within(600s));
      Agent agent(store, options);
      const auto end = std::chrono::steady_clock::now() + life;
      do {
        EXPECT_EQ(agent.call<add_ints>(rank % 2, rank, 1), rank + 1);
        const RRef<Tensor> there = agent.remote<filled>(0, 5.0);
        EXPECT_EQ(agent.call<first_of>(1, there), 5);
        const Tensor x = wanting(ones({4}));
        Context context(agent);
        const Tensor y = agent.call<tripled>(0, x);
        store->set(concat("test/works/", rank), "", within(60s));
        if (std::chrono::steady_clock::now() >= end) raise(SIGKILL);  // with a context and references that are alive
      } while (true);
    }
    Agent agent(store, options);
    expect_soon("the other is there", [&] { return agent.workers().size() == 2; });
    for (int victim = 2; victim < 2 + victims; ++victim) {
      if (rank == 0) store->set(concat(turn, victim), "", within(60s));
      const std::string works = concat("test/works/", victim);
      const Deadline deadline = within(120s);
      bool has_worked = false;
      while (!deadline.passed() && (!has_worked || agent.workers().size() > 2)) {
        has_worked = has_worked || store->contains(works, within(60s));
        ASSERT_EQ(agent.call<add_ints>(1 - rank, victim, 1), victim + 1);
        const Tensor x = wanting(pattern({4}, victim));
        Context context(agent);
        context.backward({sum(agent.call<tripled>(1 - rank, x))});
        ASSERT_EQ(context.gradient(x).to_vector<float>(), std::vector<float>(4, 3));
        ASSERT_EQ(agent.call<first_of>(1 - rank, agent.reference(filled(victim))), victim);
        for (const WorkerInfo& worker : agent.workers()) {
          if (worker.id < 2) continue;
          try {
            agent.call<add_ints>(worker, 1, 2);
          } catch (const RpcError& error) {
            EXPECT_TRUE(error.kind() == Kind::kConnection || error.kind() == Kind::kUnknownWorker) << error.what();
          }
        }
      }
      EXPECT_TRUE(has_worked && agent.workers().size() == 2) << "victim " << victim;
    }
    agent.barrier({"worker0", "worker1"});
    expect_soon("nothing of the dead is left", [&] {
      const ReferenceCounts left = agent.debug().references;
      return left.owners + left.forks + left.pending_users + left.pending_children == 0 &&
             static_cast<dist_autograd::Contexts&>(agent).counts().contexts == 0;
    });
    agent.barrier({"worker0", "worker1"});
    agent.shutdown();
  });
  std::vector<int> expected(static_cast<size_t>(2 + victims), -SIGKILL);
  expected[0] = expected[1] = 0;
  EXPECT_EQ(ends, expected);
}

}  // namespace
}  // namespace chorale::rpc
