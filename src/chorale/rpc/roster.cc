#include "chorale/rpc/roster.h"

#include <algorithm>

#include "chorale/base/rpc_error.h"

namespace chorale::rpc {
namespace {

constexpr size_t kMostNameBytes = 127;

// Why this is no name for a worker; empty when it is one.
std::string flaw_of(const std::string& name) {
  if (name.empty()) return "it is empty";
  if (name.size() > kMostNameBytes) return concat("it has ", name.size(), " characters, and must have less than 128");
  const bool known = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == ':';
  });
  return known ? "" : "its characters must be letters, digits, '-', '_' or ':'";
}

}  // namespace

void check_name(const WorkerInfo& worker) {
  if (const std::string flaw = flaw_of(worker.name); !flaw.empty())
    throw RpcError(RpcErrorKind::kBadName, worker.id,
                   concat("[rpc] '", worker.name.substr(0, 200), "' is no name for worker ", worker.id, ": ", flaw));
}

void Roster::fill(const std::vector<std::string>& names) {
  const std::lock_guard lock(mutex_);
  for (const std::string& name : names) {
    const int id = static_cast<int>(workers_.size());
    check_name({name, id});
    const auto [there, fresh] = by_name_.emplace(name, id);
    if (!fresh)
      throw RpcError(RpcErrorKind::kDuplicateName, id,
                     concat("[rpc] workers ", there->second, " and ", id, " are both called '", name,
                            "'; give each its own name"));
    workers_.emplace(id, Entry{.name = name});
  }
}

void Roster::add(const WorkerInfo& worker, uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  Entry& entry = workers_[worker.id];
  if (entry.is_here) by_name_.erase(entry.name);
  entry = {worker.name, ticket, true};
  by_name_[worker.name] = worker.id;
}

bool Roster::remove(int id, uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = workers_.find(id);
  if (found == workers_.end() || !found->second.is_here || found->second.ticket != ticket) return false;
  found->second.is_here = false;
  if (const auto name = by_name_.find(found->second.name); name != by_name_.end() && name->second == id)
    by_name_.erase(name);
  return true;
}

WorkerInfo Roster::find(const To& to) const {
  const std::lock_guard lock(mutex_);
  const auto unknown = [&](const auto& what) -> RpcError {
    std::string names;
    for (const auto& [name, id] : by_name_) names += concat(names.empty() ? "" : ", ", name);
    return {RpcErrorKind::kUnknownWorker, -1, concat("[rpc] there is no worker ", what, "; there are ", names)};
  };
  if (const auto* name = std::get_if<std::string>(&to.worker())) {
    const auto found = by_name_.find(*name);
    if (found == by_name_.end()) throw unknown("'" + *name + "'");
    return {*name, found->second};
  }
  const int64_t id = std::get<int64_t>(to.worker());
  const auto found = id < 0 || id > INT32_MAX ? workers_.end() : workers_.find(static_cast<int>(id));
  if (found == workers_.end() || !found->second.is_here) throw unknown(id);
  return {found->second.name, found->first};
}

WorkerInfo Roster::known(int id) const {
  const std::lock_guard lock(mutex_);
  const auto found = workers_.find(id);
  return {found == workers_.end() ? concat("worker ", id) : found->second.name, id};
}

uint64_t Roster::ticket_of(int id) const {
  const std::lock_guard lock(mutex_);
  const auto found = workers_.find(id);
  return found == workers_.end() || !found->second.is_here ? 0 : found->second.ticket;
}

bool Roster::contains(int id) const {
  const std::lock_guard lock(mutex_);
  const auto found = workers_.find(id);
  return found != workers_.end() && found->second.is_here;
}

std::vector<WorkerInfo> Roster::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerInfo> workers;
  workers.reserve(workers_.size());
  for (const auto& [id, entry] : workers_) {
    if (entry.is_here) workers.push_back({entry.name, id});
  }
  return workers;
}

}  // namespace chorale::rpc
