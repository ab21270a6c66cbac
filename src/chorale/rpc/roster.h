// Inside rpc: the workers of a group. In a group that changes they come and go.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "chorale/rpc/worker.h"

namespace chorale::rpc {

// RpcError (kBadName), saying which rule it breaks.
void check_name(const WorkerInfo& worker);

// Thread-safe.
class Roster {
 public:
  // The workers of a group that does not change: worker i has the i-th name. RpcError for names that are none, and for
  // two that are equal.
  void fill(const std::vector<std::string>& names);
  // A worker that has come, with its ticket (Note [Groups that change]).
  void add(const WorkerInfo& worker, uint64_t ticket);
  // False when it is not there any more, or another one has its number by now.
  bool remove(int id, uint64_t ticket);

  // RpcError (kUnknownWorker) when there is none.
  WorkerInfo find(const To& to) const;
  // The worker of this number, also one that has gone.
  WorkerInfo known(int id) const;
  // 0 when it is not there.
  uint64_t ticket_of(int id) const;
  bool contains(int id) const;
  std::vector<WorkerInfo> all() const;

 private:
  struct Entry {
    std::string name;
    uint64_t ticket = 0;
    bool is_here = true;
  };
  mutable std::mutex mutex_;
  std::map<int, Entry> workers_;
  std::map<std::string, int, std::less<>> by_name_;
};

}  // namespace chorale::rpc
