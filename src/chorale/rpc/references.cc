#include "chorale/rpc/references.h"

#include <algorithm>

#include "chorale/base/log.h"
#include "chorale/base/rpc_error.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {
namespace {

Message control(MessageKind kind, std::initializer_list<GlobalId> ids) {
  Writer writer;
  for (const GlobalId id : ids) writer.number(id.packed);
  return {.kind = kind, .payload = std::move(writer.payload)};
}

// Wakes, at the end of a scope and behind all locks, a thread that waits for the tables to become empty.
struct NotedChange {
  Core& core;
  ~NotedChange() { core.note_change(); }
};

}  // namespace

RpcError failed_reference(const Reference& reference, const char* call) {
  return {RpcErrorKind::kReferenceFailed, reference.owner(),
          concat("[", call, "] the value of reference ", reference.id(), " on worker ", reference.owner(),
                 " could not be made: the call that was to make it failed or took too long")};
}

std::shared_ptr<Core> Reference::core() const {
  auto core = core_.lock();
  if (!core || !core->is_running())
    throw RpcError(RpcErrorKind::kNotRunning, -1,
                   concat("[rref] the agent of reference ", id_, " was shut down; it is of no use any more"));
  return core;
}

Future<std::string> Reference::type(const std::function<Future<std::string>()>& ask) {
  const std::lock_guard lock(mutex_);
  if (!type_ || (type_->is_complete() && type_->has_error())) type_ = ask();
  return *type_;
}

UserReference::~UserReference() {
  if (const auto core = weak_core().lock()) core->references().tell_end(*this);
}

void OwnerReference::check_usable(const char* call) const {
  if (own_call && own_call->is_complete() && own_call->has_error()) throw failed_reference(*this, call);
}

void UserReference::check_usable(const char* call) const {
  if (failed) throw failed_reference(*this, call);
  if (deleted)
    throw RpcError(RpcErrorKind::kReferenceDeleted, owner(),
                   concat("[", call, "] reference ", id(), " was deleted when the agent shut down"));
}

GlobalId References::next_id() {
  const std::lock_guard lock(mutex_);
  return GlobalId::of(core_.own(), next_++);
}

// ---- making them

std::shared_ptr<OwnerReference> References::make_local(AnyValue value) {
  auto reference = std::make_shared<OwnerReference>(core_.weak(), next_id(), core_.own());
  reference->value.set(std::move(value));
  reference->asked_for = true;
  return reference;
}

std::shared_ptr<OwnerReference> References::make_own() {
  const GlobalId id = next_id();
  auto reference = get_or_create(id);
  reference->asked_for = true;
  reference->own_call.emplace();
  add_fork(id, id, core_.own());
  return reference;
}

void References::done_with_self(GlobalId id) { delete_fork(id, id); }

std::shared_ptr<UserReference> References::make_user(int owner) {
  const GlobalId id = next_id();
  auto user = std::make_shared<UserReference>(core_.weak(), id, owner, next_id());
  const std::lock_guard lock(mutex_);
  pending_users_.emplace(user->fork(), user);
  return user;
}

void References::created(const std::shared_ptr<UserReference>& user) {
  const NotedChange change{core_};
  std::shared_ptr<UserReference> held;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = pending_users_.find(user->fork()); found != pending_users_.end()) {
      held = std::move(found->second);
      pending_users_.erase(found);
    }
    user->known = true;
    confirmed_users_[user->fork()] = user;
  }
  user->confirmed.state()->try_set({});
  user->created.state()->try_set({});
}

void References::not_created(const std::shared_ptr<UserReference>& user, const std::exception_ptr& error) {
  const NotedChange change{core_};
  std::shared_ptr<UserReference> held;
  {
    const std::lock_guard lock(mutex_);
    user->failed = true;
    if (const auto found = pending_users_.find(user->fork()); found != pending_users_.end()) {
      held = std::move(found->second);
      pending_users_.erase(found);
    }
  }
  user->created.state()->try_set_error(error);
  user->confirmed.state()->try_set_error(error);
}

// ---- passing them on

ForkData References::fork(const std::shared_ptr<Reference>& reference, int to, const std::string& type) {
  const GlobalId fork = next_id();
  const std::lock_guard lock(mutex_);
  reference->check_usable("rref");
  if (reference->is_owner() && to != core_.own()) {
    owners_.emplace(reference->id(), std::static_pointer_cast<OwnerReference>(reference));
    forks_[reference->id()].emplace(fork, to);
  } else {
    pending_children_.emplace(fork, Passed{reference, to});
  }
  return {reference->owner(), core_.own(), reference->id().packed, fork.packed, type};
}

std::shared_ptr<Reference> References::adopt(const ForkData& data, int from,
                                             std::vector<std::shared_ptr<FutureState>>& gates) {
  const GlobalId id{data.id}, fork{data.fork};
  CHORALE_CHECK(data.parent == from && core_.awaits_worker(data.owner), "[rpc] reference ", id, " has owner ",
                data.owner, " and came from ", from, " for ", data.parent);
  if (from == core_.own()) {  // it never left
    std::shared_ptr<Reference> same = child_accepted(fork);
    CHORALE_CHECK(same, "[rpc] reference ", id, " was read twice");
    if (!same->is_owner()) gates.push_back(static_cast<UserReference&>(*same).confirmed.state());
    return same;
  }
  if (data.owner == core_.own()) {
    std::shared_ptr<OwnerReference> owner = get_or_create(id);
    core_.send_control(from, control(MessageKind::kChildAccept, {fork}));
    return owner;
  }
  auto user = std::make_shared<UserReference>(core_.weak(), id, data.owner, fork);
  user->created.set({});
  if (from == data.owner) {
    const std::lock_guard lock(mutex_);
    user->known = true;
    confirmed_users_[fork] = user;
    user->confirmed.set({});
    return user;
  }
  {
    const std::lock_guard lock(mutex_);
    pending_users_.emplace(fork, user);
  }
  gates.push_back(user->confirmed.state());
  core_.send_control(data.owner, control(MessageKind::kForkRequest, {id, fork}),
                     [this, user, from, fork](const std::exception_ptr& error) {
                       if (!error) {
                         created(user);
                         return accept_child(fork, from);
                       }
                       not_created(user, error);
                       std::vector<std::pair<GlobalId, int>> due;
                       {
                         const std::lock_guard lock(mutex_);
                         owed_accepts_.emplace(fork, from);
                         due = due_accepts();
                       }
                       for (const auto& [child, parent] : due) accept_child(child, parent);
                     });
  return user;
}

void References::accept_child(GlobalId fork, int parent) {
  core_.send_control(parent, control(MessageKind::kChildAccept, {fork}));
}

std::vector<std::pair<GlobalId, int>> References::due_accepts() {
  std::vector<std::pair<GlobalId, int>> due;
  std::erase_if(owed_accepts_, [&](const auto& owed) {
    for (const auto& [child, passed] : pending_children_) {
      const Reference& parent = *passed.parent;
      if (!parent.is_owner() && static_cast<const UserReference&>(parent).fork() == owed.first) return false;
    }
    due.push_back(owed);
    return true;
  });
  return due;
}

void References::take_back(GlobalId id, GlobalId fork) {
  child_accepted(fork);
  delete_fork(id, fork);
}

PassedOn::~PassedOn() {
  const auto core = taken_ < numbers_.size() ? core_.lock() : nullptr;
  if (!core) return;
  for (size_t i = taken_; i < numbers_.size(); ++i)
    core->references().take_back({numbers_[i].first}, {numbers_[i].second});
}

// ---- on the owner

std::shared_ptr<OwnerReference> References::get_or_create(GlobalId id) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<OwnerReference>& entry = owners_[id];
  if (!entry) entry = std::make_shared<OwnerReference>(core_.weak(), id, core_.own());
  return entry;
}

void References::add_fork(GlobalId id, GlobalId fork, int holder) {
  get_or_create(id);
  const std::lock_guard lock(mutex_);
  forks_[id].emplace(fork, holder);
}

void References::delete_fork(GlobalId id, GlobalId fork) {
  const NotedChange change{core_};
  std::shared_ptr<OwnerReference> dropped;  // outside the lock
  const std::lock_guard lock(mutex_);
  const auto found = forks_.find(id);
  if (found == forks_.end()) return;
  if (found->second.erase(fork) == 0 || !found->second.empty()) return;
  forks_.erase(found);
  const auto owner = owners_.find(id);
  if (owner != owners_.end() && owner->second->asked_for) {
    dropped = std::move(owner->second);
    owners_.erase(owner);
  }
}

std::shared_ptr<Reference> References::child_accepted(GlobalId fork) {
  const NotedChange change{core_};
  std::shared_ptr<Reference> parent;
  std::vector<std::pair<GlobalId, int>> due;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_children_.find(fork);
    if (found == pending_children_.end()) return {};
    parent = std::move(found->second.parent);
    pending_children_.erase(found);
    due = due_accepts();
  }
  for (const auto& [child, worker] : due) accept_child(child, worker);
  return parent;
}

void References::tell_end(UserReference& user) {
  if (!user.known || user.deleted.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
    confirmed_users_.erase(user.fork());
  }
  core_.send_control(user.owner(), control(MessageKind::kUserDelete, {user.id(), user.fork()}));
}

// ---- the end

bool References::delete_users(Deadline deadline) {
  const bool settled = core_.wait_until(
      [&] {
        const std::lock_guard lock(mutex_);
        return pending_users_.empty() && pending_children_.empty();
      },
      deadline);
  if (!settled) return false;
  std::vector<std::shared_ptr<UserReference>> users;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [fork, weak] : confirmed_users_) {
      if (auto user = weak.lock()) users.push_back(std::move(user));
    }
  }
  for (const auto& user : users) tell_end(*user);
  return true;
}

bool References::delete_all(Deadline deadline) {
  if (!delete_users(deadline)) return false;
  std::vector<std::shared_ptr<OwnerReference>> never_forked;
  {
    const std::lock_guard lock(mutex_);
    for (auto at = owners_.begin(); at != owners_.end();) {
      if (forks_.contains(at->first)) {
        ++at;
      } else {
        never_forked.push_back(std::move(at->second));
        at = owners_.erase(at);
      }
    }
  }
  return core_.wait_until(
      [&] {
        const std::lock_guard lock(mutex_);
        return owners_.empty();
      },
      deadline);
}

std::string References::leaks() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [id, forks] : forks_) {
    text += concat(text.empty() ? "" : ", ", "reference ", id, " held by worker");
    std::set<int> workers;
    for (const auto& [fork, holder] : forks) workers.insert(holder);
    for (const int worker : workers) text += concat(" ", worker);
  }
  return text;
}

ReferenceCounts References::counts() const {
  const std::lock_guard lock(mutex_);
  ReferenceCounts counts{.owners = owners_.size(),
                         .pending_users = pending_users_.size(),
                         .pending_children = pending_children_.size(),
                         .users = confirmed_users_.size()};
  for (const auto& [id, owner] : owners_) counts.pending_values += owner->value.is_complete() ? 0 : 1;
  for (const auto& [id, forks] : forks_) counts.forks += forks.size();
  return counts;
}

void References::fail_values(const std::exception_ptr& error) {
  std::vector<std::shared_ptr<OwnerReference>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, owner] : owners_) all.push_back(owner);
  }
  for (const auto& owner : all) owner->value.state()->try_set_error(error);
}

void References::forget_worker(int worker) {
  std::vector<std::shared_ptr<void>> dropped;  // outside the lock
  std::vector<std::pair<GlobalId, int>> due;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(pending_children_, [&](auto& entry) {
      if (entry.second.to != worker) return false;
      dropped.push_back(std::move(entry.second.parent));
      return true;
    });
    due = due_accepts();
  }
  for (const auto& [child, parent] : due) accept_child(child, parent);
  const std::lock_guard lock(mutex_);
  for (auto at = forks_.begin(); at != forks_.end();) {
    std::erase_if(at->second, [&](const auto& fork) { return fork.second == worker; });
    if (!at->second.empty()) {
      ++at;
      continue;
    }
    const auto owner = owners_.find(at->first);
    if (owner != owners_.end() && (owner->second->asked_for || at->first.worker() == worker)) {
      dropped.push_back(std::move(owner->second));
      owners_.erase(owner);
    }
    at = forks_.erase(at);
  }
}

}  // namespace chorale::rpc
