#include "chorale/rpc/agents_test_util.h"
#include "chorale/testing/soak_test_util.h"

#include <gtest/gtest.h>

#include <thread>

namespace chorale::rpc {

using namespace std::chrono_literals;

AgentOptions for_tests(std::vector<Served> serves) {
  AgentOptions options;
  options.serves = std::move(serves);
  options.check_leaks = true;
  options.retry_after = 2ms;
  return options;
}

void run_agents(int size, const AgentOptions& options, const AgentBody& body) {
  comm::run_ranks(size, [&](comm::Group& group) {
    Agent agent(group, options);
    body(agent, group);
    agent.shutdown();
  });
}

void run_agents_in_any_order(int size, const AgentOptions& options, const AgentBody& body) {
  run_agents(size, options, body);
  // Making agents takes longer than most bodies: those of one seed of delays serve several runs, whose messages are
  // late by other times each.
  constexpr int kRunsPerAgent = 10;
  const int seeds = seeds_to_try(200, 5000);
  comm::run_ranks(size, [&](comm::Group& group) {
    for (int first = 0; first < seeds; first += kRunsPerAgent) {
      AgentOptions late = options;
      late.threads = 4;
      late.retry_after = 100us;
      const auto repeat = options.faults.repeat;
      late.faults = Faults::chaos(static_cast<uint64_t>(first) + 1, 100us);
      late.faults.repeat.insert(repeat.begin(), repeat.end());
      Agent agent(group, late);
      for (int seed = first; seed < first + kRunsPerAgent; ++seed) {
        SCOPED_TRACE(concat("seed ", seed));
        body(agent, group);
      }
      agent.shutdown();  // what is left would be an error
      const ReferenceCounts left = agent.debug().references;
      ASSERT_EQ(left.owners + left.forks + left.pending_users + left.pending_children, 0u) << "seed " << first;
    }
  });
}

std::vector<int> run_agent_processes(int size, const AgentOptions& options, const AgentBody& body) {
  return comm::run_processes(size, [&](comm::Group& group) {
    Agent agent(group, options);
    body(agent, group);
  });
}

std::string next(const Agent& agent, int step) {
  const auto count = static_cast<int>(agent.workers().size());
  return agent.workers()[static_cast<size_t>((agent.info().id + step) % count)].name;
}

std::string text_of(RpcErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const RpcError& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

std::string text_of(RpcErrorKind kind, int worker, const std::function<void()>& call) {
  return text_of(kind, [&] {
    try {
      call();
    } catch (const RpcError& error) {
      EXPECT_EQ(error.worker(), worker) << error.what();
      throw;
    }
  });
}

void expect_soon(const char* what, const std::function<bool()>& holds) {
  const Deadline deadline = within(10s);
  while (!holds()) {
    if (deadline.passed()) {
      ADD_FAILURE() << "not within ten seconds: " << what;
      return;
    }
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace chorale::rpc
