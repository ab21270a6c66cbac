// Inside rpc: remote references and the workers that hold them.
//
// Note [References]
// A value lives on its owner for as long as any worker has a reference to it. Every reference on another worker (a
// user) has a number of its own, its fork, and the owner keeps the set of forks. Messages may overtake each other, so
// (1) a user tells the owner of its end only after the owner has confirmed it;
// (2) a user that has passed itself on lives until the owner has confirmed the new one: the child asks the owner
//     (fork request), and tells its parent afterwards (child accept).
// Hence some fork that the owner knows is alive for as long as any user is, once the call that makes the value has
// come; before that the owner keeps the entry in any case (docs/dev/references.pml is a model of it). A user's own
// handle may be gone long before: the tables here hold it (`pending users`, `pending children`). A reference that comes
// back to its owner makes no fork; the owner accepts the child at once. A fork that its receiver has not taken, because
// the message was not sent or was refused, comes back (PassedOn in rpc/codec.h). A user whose owner does not answer is
// of no use, and tells its parent so; if it has been passed on meanwhile, when its own children are known, which
// nothing else keeps alive. A function runs only when the references among its arguments are confirmed. Control
// messages may be lost and sent again, and may come twice; they take effect once (Note [Control messages] in
// rpc/control_numbers.h). Objects are let go of outside the lock: their ends send messages.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "chorale/base/rpc_error.h"
#include "chorale/rpc/served.h"

namespace chorale::rpc {

class Core;
class References;

// The worker that chose it, and a number there.
struct GlobalId {
  uint64_t packed = 0;
  static GlobalId of(int worker, uint64_t number) { return {static_cast<uint64_t>(worker) << 48 | number}; }
  int worker() const { return static_cast<int>(packed >> 48); }
  uint64_t number() const { return packed & ((uint64_t{1} << 48) - 1); }
  friend auto operator<=>(const GlobalId&, const GlobalId&) = default;  // NOLINT(modernize-use-nullptr): not one here
  friend std::ostream& operator<<(std::ostream& out, GlobalId id) {
    return out << "(created_on=" << id.worker() << ", local_id=" << id.number() << ")";
  }
};

// What handles (RRef) of one worker share.
class Reference {
 public:
  Reference(std::weak_ptr<Core> core, GlobalId id, int owner) : core_(std::move(core)), id_(id), owner_(owner) {}
  virtual ~Reference() = default;
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  virtual bool is_owner() const = 0;
  // RpcError when the value could not be asked for, or the agent has deleted the reference.
  virtual void check_usable(const char* call) const = 0;
  GlobalId id() const { return id_; }
  int owner() const { return owner_; }
  // RpcError (kNotRunning) when the agent is gone.
  std::shared_ptr<Core> core() const;
  const std::weak_ptr<Core>& weak_core() const { return core_; }
  // The type of the value, which `ask` asks for: once, unless that fails.
  Future<std::string> type(const std::function<Future<std::string>()>& ask);

 private:
  std::mutex mutex_;
  std::optional<Future<std::string>> type_;  // with the lock
  const std::weak_ptr<Core> core_;
  const GlobalId id_;
  const int owner_;
};

class OwnerReference final : public Reference {
 public:
  using Reference::Reference;
  bool is_owner() const override { return true; }
  void check_usable(const char* call) const override;
  Future<AnyValue> value;
  // The call that makes the value has come. Before that it is kept even when no user is known: the one that called is
  // not known yet.
  std::atomic<bool> asked_for{false};
  // The answer to a call of remote() by the owner itself; none: others have made it.
  std::optional<Future<void>> own_call{};
};

class UserReference final : public Reference {
 public:
  UserReference(std::weak_ptr<Core> core, GlobalId id, int owner, GlobalId fork)
      : Reference(std::move(core), id, owner), fork_(fork) {}
  ~UserReference() override;
  bool is_owner() const override { return false; }
  GlobalId fork() const { return fork_; }
  void check_usable(const char* call) const override;

  Future<void> created;              // the owner has answered
  Future<void> confirmed;            // the owner knows this user
  std::atomic<bool> failed{false};   // the value could not be asked for
  std::atomic<bool> deleted{false};  // the owner was told of its end
  std::atomic<bool> known{false};    // its owner counts it: its end must be told

 private:
  const GlobalId fork_;
};

// What `call` throws: an error of kind kReferenceFailed.
RpcError failed_reference(const Reference& reference, const char* call);

// What a reference is on the wire.
struct ForkData {
  int32_t owner = -1, parent = -1;
  uint64_t id = 0, fork = 0;
  std::string type;
  CHORALE_MESSAGE(ForkData, owner, parent, id, fork, type)
};

struct ReferenceCounts {
  size_t owners = 0, pending_values = 0, pending_users = 0, forks = 0, pending_children = 0, users = 0;
};

class References {
 public:
  // Numbers begin at `first`.
  explicit References(Core& core, uint64_t first = 0) : core_(core), next_(first) {}

  GlobalId next_id();
  // ---- making them
  // Nobody else knows it yet.
  std::shared_ptr<OwnerReference> make_local(AnyValue value);
  // remote() to this worker makes one: it is its own fork until done_with_self().
  std::shared_ptr<OwnerReference> make_own();
  void done_with_self(GlobalId id);
  std::shared_ptr<UserReference> make_user(int owner);
  // The answer to the remote call that made it.
  void created(const std::shared_ptr<UserReference>& user);
  void not_created(const std::shared_ptr<UserReference>& user, const std::exception_ptr& error);

  // ---- passing them on
  ForkData fork(const std::shared_ptr<Reference>& reference, int to, const std::string& type);
  // The receiver has not taken this fork, and never will.
  void take_back(GlobalId id, GlobalId fork);
  std::shared_ptr<Reference> adopt(const ForkData& data, int from, std::vector<std::shared_ptr<FutureState>>& gates);

  // ---- on the owner
  std::shared_ptr<OwnerReference> get_or_create(GlobalId id);
  void add_fork(GlobalId id, GlobalId fork, int holder);
  void delete_fork(GlobalId id, GlobalId fork);
  // The parent lets go of what was held for this fork, and returns it.
  std::shared_ptr<Reference> child_accepted(GlobalId fork);
  // The end of a user, in its destructor or at shutdown.
  void tell_end(UserReference& user);

  // ---- the end
  // Deletes all users that are still held. False: some were not known to their owners in time.
  bool delete_users(Deadline deadline);
  // Does so, and waits until nobody refers to anything here. False: not in time.
  bool delete_all(Deadline deadline);
  // The references that are left, by id and with the workers that hold them; empty when there are none.
  std::string leaks() const;
  ReferenceCounts counts() const;
  // Fails the values that are not there yet: they will never be.
  void fail_values(const std::exception_ptr& error);
  // A worker has ended, and with it all that it held.
  void forget_worker(int worker);

 private:
  void accept_child(GlobalId fork, int parent);
  // The acceptances of references whose children are known by now. Called with the lock.
  std::vector<std::pair<GlobalId, int>> due_accepts();

  Core& core_;
  mutable std::mutex mutex_;
  uint64_t next_;
  std::map<GlobalId, std::shared_ptr<OwnerReference>> owners_;
  std::map<GlobalId, std::map<GlobalId, int>> forks_;  // by reference: its users, and the workers that hold them
  std::map<GlobalId, std::shared_ptr<UserReference>> pending_users_;
  std::map<GlobalId, std::weak_ptr<UserReference>> confirmed_users_;
  struct Passed {
    std::shared_ptr<Reference> parent;
    int to;
  };
  std::map<GlobalId, Passed> pending_children_;
  // Users that have failed while the owner did not know their children, by fork, with the workers of their parents.
  std::map<GlobalId, int> owed_accepts_;
};

}  // namespace chorale::rpc
