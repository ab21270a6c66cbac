// Inside comm: what moves the data of a group. One per group and rank; the group's promises (order, deadlines, errors)
// are the engine's to keep, so that another transport is another Engine.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "chorale/comm/operation.h"
#include "chorale/device/allocator.h"
#include "chorale/transport/fabric/chaos.h"

namespace chorale::comm {

class Engine;
class NetHub;

// What the groups of one rank share. A wait in one group moves the others too: ranks may wait for the works of two
// groups in different orders.
class RankContext {
 public:
  std::mutex mutex;  // guards every engine of this rank
  std::vector<Engine*> engines;
  // False when ranks outnumber cores: who waits then gives the core away at once.
  bool core_each = true;
  // Payloads carry checksums, which every receiver verifies.
  bool checksum = false;
  // Faults on purpose; null: none.
  std::shared_ptr<transport::Chaos> chaos;
  // Groups are named by a count of all that were made, also of those this rank is not in.
  int64_t groups_made = 0;

  // What connects this rank with those on other hosts; null when there are none.
  std::shared_ptr<NetHub> net;

  // Memory that peers can map, for data that lies elsewhere.
  CachingAllocator& scratch();
  // One with a lock of its own and the same scratch memory, for the engine of one host inside that of several.
  std::shared_ptr<RankContext> inner();

 private:
  std::shared_ptr<CachingAllocator> scratch_;
};

// Who is in a group. A rank without prefix is a group rank: 0 to size - 1 in ascending order of global ranks.
struct Membership {
  std::string name;
  int rank = -1;
  std::vector<int> members;  // global ranks, ascending
  int size() const { return static_cast<int>(members.size()); }
};

class Engine {
 public:
  Engine(std::shared_ptr<RankContext> context, Membership membership)
      : context_(std::move(context)), membership_(std::move(membership)) {}
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Membership& membership() const { return membership_; }
  RankContext& context() const { return *context_; }
  const std::shared_ptr<RankContext>& shared_context() const { return context_; }
  virtual const char* backend() const = 0;
  // An engine of the same kind for some of the members, all of which call this. Null: their group is made from nothing.
  virtual std::shared_ptr<Engine> make_subgroup(const Membership&) { return nullptr; }

  // The rest is called with the context's mutex locked.

  // Numbers the call, starts it if nothing is before it, and returns. Throws CommError when the group is broken.
  virtual void submit(const Intrusive<Operation>& operation) = 0;
  // Moves everything as far as it goes without waiting.
  virtual void progress() = 0;
  virtual bool idle() const = 0;
  // The operation has not moved for `rounds` calls of progress(). Waits a little in a way that fits, and looks for the
  // reason: fails the group when a peer is gone or the deadline has passed. May unlock and lock again.
  virtual void wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                             Deadline deadline) = 0;
  // Peers who ask where this rank is (and it is still there, or gone without another call) are told of this text too.
  virtual void note_exception(const std::string& what) = 0;
  // The same look without a wait, for an operation that is only polled.
  virtual void look(Operation& operation) = 0;
  // The last calls of this rank as JSON text (docs: flight recorder).
  virtual std::string flight_record() const = 0;
  virtual uint32_t last_number() const = 0;
  // Without the lock.
  virtual bool is_broken() const = 0;

 protected:
  // An engine is moved by waits in other groups of its rank from enlist(), when it is complete, to delist(), before its
  // parts go. delist() is called with the lock.
  void enlist();
  void delist();
  // Ends an operation; `error` is null when it succeeded. Who waits for it sees it at once, callbacks run later,
  // without the lock.
  void complete(Operation& operation, std::exception_ptr error);

 private:
  // For the trace.
  void note(Operation& operation) const;

  const std::shared_ptr<RankContext> context_;
  const Membership membership_;
};

// Blocks until the operation is done; rethrows its error.
void wait(Engine& engine, Operation& operation, Deadline deadline);
bool poll(Engine& engine, Operation& operation);

}  // namespace chorale::comm
