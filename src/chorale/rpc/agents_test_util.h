// Agents for tests: one per rank, ranks as threads of this process unless a test says otherwise.
#pragma once

#include <functional>
#include <string>

#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/rpc/agent.h"

namespace chorale::rpc {

// Leaks are errors; control messages are sent again soon.
AgentOptions for_tests(std::vector<Served> serves);

// Runs `body` on `size` ranks with an agent each, called worker0, worker1, …, and shuts down gracefully.
using AgentBody = std::function<void(Agent& agent, comm::Group& group)>;
void run_agents(int size, const AgentOptions& options, const AgentBody& body);
// The same, and then with 200 seeds (5,000 with CHORALE_SOAK): messages overtake each other, and control messages fail
// or come twice, as the seed says. At the end of each agent no reference may be left. `body` must leave nothing behind
// that a further one would see.
void run_agents_in_any_order(int size, const AgentOptions& options, const AgentBody& body);
// The same with processes.
std::vector<int> run_agent_processes(int size, const AgentOptions& options, const AgentBody& body);

// The name of the worker so many places behind this one, in a ring.
std::string next(const Agent& agent, int step = 1);

// The RpcError that `call` throws, which must be of this kind; its text.
std::string text_of(RpcErrorKind kind, const std::function<void()>& call);
// The error must also name the worker where it arose.
std::string text_of(RpcErrorKind kind, int worker, const std::function<void()>& call);

// Waits until this is so, or fails the test after ten seconds.
void expect_soon(const char* what, const std::function<bool()>& holds);

}  // namespace chorale::rpc
