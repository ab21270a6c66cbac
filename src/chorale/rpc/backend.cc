#include "chorale/rpc/backend.h"

#include <map>
#include <mutex>

#include "chorale/base/rpc_error.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {
namespace {

std::shared_ptr<Core> start_faulty(const comm::Group& group, AgentOptions options) {
  options.threads = 8;
  if (options.faults.empty()) options.faults = Faults::usual();
  return Core::start(group, std::move(options));
}

struct Backends {
  std::mutex mutex;
  std::map<std::string, Backend> by_name{{"group", Core::start}, {"faulty", start_faulty}};
};
Backends& backends() {
  static Backends all;
  return all;
}

}  // namespace

void register_backend(const std::string& name, Backend backend) {
  Backends& all = backends();
  const std::lock_guard lock(all.mutex);
  if (!all.by_name.emplace(name, std::move(backend)).second)
    throw RpcError(RpcErrorKind::kDuplicateBackend, -1,
                   concat("[rpc] there is a backend '", name, "' already; give this one another name"));
}

std::shared_ptr<Core> start_agent(const comm::Group& group, AgentOptions options) {
  Backend backend;
  {
    Backends& all = backends();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_name.find(options.backend);
    std::string names;
    for (const auto& [name, start] : all.by_name) names += concat(names.empty() ? "" : ", ", name);
    CHORALE_CHECK(found != all.by_name.end(), "[rpc] there is no backend '", options.backend, "'; there are ", names);
    backend = found->second;
  }
  return backend(group, std::move(options));
}

}  // namespace chorale::rpc
