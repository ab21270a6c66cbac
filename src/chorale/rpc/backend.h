// How agents are made, by name (AgentOptions::backend).
//
//   group      one agent for each rank of a group; the default
//   faulty     the same with faults on purpose, for tests of what is built on calls, and with eight threads: unless the
//              options name faults, the first three sends of each control message fail, and plain calls are sent 1.5
//              seconds late
//
// A program may add others, which change the options or wrap something around the start.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "chorale/comm/group.h"
#include "chorale/rpc/agent_options.h"

namespace chorale::rpc {

class Core;
using Backend = std::function<std::shared_ptr<Core>(const comm::Group& group, AgentOptions options)>;

// Registers it for this process. RpcError (kDuplicateBackend) when there is one of this name.
void register_backend(const std::string& name, Backend backend);
// Starts it with the backend that the options name; InvalidArgument, listing those that there are, when there is none
// of that name.
std::shared_ptr<Core> start_agent(const comm::Group& group, AgentOptions options);

}  // namespace chorale::rpc
