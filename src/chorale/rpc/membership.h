// Inside rpc: how the workers of a group that changes find each other.
//
// Note [Groups that change]
// A worker that joins draws a ticket at the store, a number that is never given out twice, and takes its name and its
// number there; a name is free again when the worker that had it has left or ended. Then it writes that it is there.
// All workers watch for that, and every two of them meet as a group of two (comm/group.h), over which they talk, so
// that the end of a worker concerns nobody's talk with others. A worker has joined when it has met all that were there
// and each of them has said hello. The store is needed to come and to go only, not for calls. What a worker that was
// killed has left at the store is removed by those that notice its end. A worker that comes later may have its number,
// so what belongs to one of the two is told apart by the ticket, and numbers of references and contexts begin at the
// ticket's.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "chorale/comm/group.h"
#include "chorale/rpc/worker.h"

namespace chorale::rpc {

class Membership {
 public:
  using Came = std::function<void(const WorkerInfo& worker, uint64_t ticket, comm::Group pair)>;
  // Takes name and number at the store. Throws RpcError (kDuplicateName) when another worker has one of them, and
  // StateError when agents of a group that does not change use the store.
  Membership(std::shared_ptr<transport::Store> store, WorkerInfo own, Timeout patience);
  // Leaves.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  uint64_t ticket() const { return ticket_; }
  // Returns when all workers that are there were met; those that come later are met by threads of this object. Throws
  // RpcError (kConnection) when one is there, but does not come to meet this one in time.
  void join(Came came);
  // A worker has left or ended: its name is free.
  void forget(const WorkerInfo& worker, uint64_t ticket);
  // Meets nobody any more, and gives name and number back.
  void leave();

 private:
  struct Peer {
    WorkerInfo info;
    enum class State { kMeets, kMet, kGone } state = State::kMeets;
    std::thread thread{};
  };
  bool take(const std::string& key);
  void release(const std::string& key, uint64_t ticket);
  void release_all(const WorkerInfo& worker, uint64_t ticket);
  void look();
  void meet(uint64_t ticket, const WorkerInfo& worker);
  void watch(int64_t round);
  bool stops() const;

  const std::shared_ptr<transport::Store> store_;
  const WorkerInfo own_;
  const Timeout patience_;
  uint64_t ticket_ = 0;
  Came came_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Peer> peers_;
  bool stops_ = false;
  std::thread watcher_;
};

// Agents of a group that does not change say that they use a store, as long as this lives. StateError when workers of a
// group that changes do.
class StaticUse {
 public:
  // The store must live longer.
  explicit StaticUse(transport::Store& store);
  ~StaticUse();
  StaticUse(const StaticUse&) = delete;
  StaticUse& operator=(const StaticUse&) = delete;

 private:
  transport::Store& store_;
};

}  // namespace chorale::rpc
