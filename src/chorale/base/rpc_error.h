// What can go wrong with a call of a function on another worker: a CommError that says of what kind it is and on which
// worker it arose.
#pragma once

#include <cstdint>
#include <string>

#include "chorale/base/comm_error.h"

namespace chorale {

enum class RpcErrorKind : uint8_t {
  kRemote,          // the function threw there
  kTimeout,         // no answer in time; the function may still run
  kInjected,        // by faults on purpose
  kConnection,      // the worker is gone or cannot be reached
  kNotRunning,      // this agent was shut down
  kAlreadyRunning,  // the group has an agent
  kBadName,         // of a worker
  kDuplicateName,   // of a worker
  kUnknownWorker,
  kUnknownFunction,   // the worker does not serve it
  kWrongArguments,    // it serves one of that name with other types
  kReferenceFailed,   // the value of a remote reference could not be made
  kReferenceDeleted,  // the agent has deleted it at shutdown
  kReferenceLeak,     // references were left at shutdown
  kNotOwner,          // only the owner of a reference may do this
  kUnsupported,
  kNestedContext,   // this thread is in a context of distributed autograd already
  kUnknownContext,  // there is none with that number here
  kDeadContext,     // it was released while it was in use
  kDuplicateBackend,
};
inline constexpr int kRpcErrorKinds = static_cast<int>(RpcErrorKind::kDuplicateBackend) + 1;

class RpcError : public CommError {
 public:
  // `worker`: where it arose; -1: not known.
  RpcError(RpcErrorKind kind, int worker, const std::string& message)
      : CommError(message, {.rank = -1, .peer = worker, .collective = "rpc"}), kind_(kind) {}
  RpcErrorKind kind() const noexcept { return kind_; }
  int worker() const noexcept { return failure().peer; }

 private:
  RpcErrorKind kind_;
};

}  // namespace chorale
