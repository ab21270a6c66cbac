#include "chorale/rpc/membership.h"

#include <charconv>

#include "chorale/base/log.h"
#include "chorale/base/rpc_error.h"
#include "chorale/transport/keep_alive.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

// The time for one question to the store.
constexpr auto kStoreTime = 30s;
// A worker that leaves waits no longer for a store than for a silent host: the store may be on one that is lost.
Deadline ending() { return within(transport::keep_alive()); }
// A thread that meets a worker looks after kMeetTime whether that is still there, and one that watches looks for itself
// after kWatchTime: a worker that was killed while it joined may have left out what wakes others.
constexpr std::chrono::milliseconds kMeetTime = 2s, kWatchTime = 250ms;

constexpr const char *kMembers = "rpc/member/", *kRound = "rpc/round", *kStatic = "rpc/static",
                     *kDynamic = "rpc/dynamic";

std::string member_key(uint64_t ticket) { return concat(kMembers, ticket); }
std::string came_key(int64_t round) { return concat("rpc/came/", round); }

// "ID NAME".
std::optional<WorkerInfo> parse_member(const std::string& text) {
  WorkerInfo worker;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), worker.id);
  if (error != std::errc() || end == text.data() + text.size() || *end != ' ') return std::nullopt;
  worker.name = text.substr(static_cast<size_t>(end - text.data()) + 1);
  return worker;
}

[[noreturn]] void raise_mixed() {
  throw StateError(
      "[rpc] agents of a group that does not change and agents that join one by one cannot use the same store; make "
      "all of them in the same way");
}

}  // namespace

StaticUse::StaticUse(transport::Store& store) : store_(store) {
  store_.add(kStatic, 1, within(kStoreTime));
  if (store_.add(kDynamic, 0, within(kStoreTime)) == 0) return;
  store_.add(kStatic, -1, within(kStoreTime));
  raise_mixed();
}
StaticUse::~StaticUse() {
  try {
    store_.add(kStatic, -1, ending());
  } catch (const CommError& error) {
    log_info(concat("[rpc] the store is gone: ", error.what()));
  }
}

Membership::Membership(std::shared_ptr<transport::Store> store, WorkerInfo own, Timeout patience)
    : store_(std::move(store)), own_(std::move(own)), patience_(patience) {
  ticket_ = static_cast<uint64_t>(store_->add("rpc/tickets", 1, within(kStoreTime)));
  // Empty: it takes its name. The worker that removes the entry takes it off the count.
  store_->set(member_key(ticket_), "", within(kStoreTime));
  store_->add(kDynamic, 1, within(kStoreTime));
  try {
    if (store_->add(kStatic, 0, within(kStoreTime)) != 0) raise_mixed();
    if (!take(concat("rpc/name/", own_.name)))
      throw RpcError(RpcErrorKind::kDuplicateName, own_.id,
                     concat("[rpc] a worker called '", own_.name, "' is there already; give each its own name"));
    if (!take(concat("rpc/id/", own_.id)))
      throw RpcError(RpcErrorKind::kDuplicateName, own_.id,
                     concat("[rpc] worker ", own_.id, " is there already; give each its own number"));
  } catch (const std::exception&) {
    leave();
    throw;
  }
}

Membership::~Membership() { leave(); }

// The entry is the ticket of the worker that has it; empty: free.
bool Membership::take(const std::string& key) {
  const std::string own = concat(ticket_);
  while (true) {
    const std::string holder = store_->compare_set(key, "", own, within(kStoreTime));
    if (holder == own) return true;
    if (store_->contains(concat(kMembers, holder), within(kStoreTime))) return false;
    // The holder has ended without releasing the key.
    store_->compare_set(key, holder, "", within(kStoreTime));
  }
}

void Membership::release(const std::string& key, uint64_t ticket) {
  store_->compare_set(key, concat(ticket), "", ending());
}

bool Membership::stops() const {
  const std::lock_guard lock(mutex_);
  return stops_;
}

void Membership::join(Came came) {
  came_ = std::move(came);
  store_->set(member_key(ticket_), concat(own_.id, " ", own_.name), within(kStoreTime));
  const int64_t round = store_->add(kRound, 1, within(kStoreTime));
  store_->set(came_key(round), "", within(kStoreTime));
  look();
  {
    const Deadline deadline = patience_.count() == 0 ? Deadline::never() : within(patience_);
    std::unique_lock lock(mutex_);
    std::string late;
    const auto all_met = [&] {
      late.clear();
      for (const auto& [ticket, peer] : peers_) {
        if (peer.state == Peer::State::kMeets) late += concat(late.empty() ? "" : ", ", peer.info.name);
      }
      return late.empty();
    };
    while (!all_met() && !deadline.passed()) changed_.wait_for(lock, 50ms);
    if (!late.empty())
      throw RpcError(RpcErrorKind::kConnection, -1,
                     concat("[rpc] these workers are in the group, but did not meet '", own_.name, "' within ",
                            std::chrono::duration<double>(patience_).count(), " s: ", late));
  }
  watcher_ = std::thread([this, round] { watch(round); });
}

// Begins to meet the workers that are there and were not met.
void Membership::look() {
  for (const std::string& key : store_->keys(kMembers, within(kStoreTime))) {
    uint64_t ticket = 0;
    const std::string number = key.substr(std::string_view(kMembers).size());
    std::from_chars(number.data(), number.data() + number.size(), ticket);
    if (ticket == 0 || ticket == ticket_) continue;
    {
      const std::lock_guard lock(mutex_);
      if (stops_ || peers_.contains(ticket)) continue;
    }
    if (!store_->contains(key, within(kStoreTime))) continue;
    const std::optional<WorkerInfo> worker = parse_member(store_->get(key, within(kStoreTime)));
    if (!worker) continue;
    const std::lock_guard lock(mutex_);
    if (stops_) return;
    Peer& peer = peers_[ticket];
    peer.info = *worker;
    peer.thread = std::thread([this, ticket, info = *worker] { meet(ticket, info); });
  }
}

void Membership::meet(uint64_t ticket, const WorkerInfo& worker) {
  const bool first = ticket_ < ticket;
  const std::string name = concat("rpc/pair/", first ? ticket_ : ticket, "-", first ? ticket : ticket_);
  auto state = Peer::State::kGone;
  try {
    while (!stops()) {
      try {
        came_(worker, ticket, comm::Group::connect(*store_, name, first ? 0 : 1, 2, {.timeout = kMeetTime}));
        state = Peer::State::kMet;
        break;
      } catch (const CommError& error) {
        log_info(concat("[rpc] worker '", worker.name, "' was not met: ", error.what()));
        if (!store_->contains(member_key(ticket), within(kStoreTime))) break;
      }
    }
  } catch (const std::exception& error) {
    log_warning(concat("[rpc] worker '", worker.name, "' cannot be met: ", error.what()));
  }
  const std::lock_guard lock(mutex_);
  peers_[ticket].state = state;
  changed_.notify_all();
}

void Membership::watch(int64_t round) {
  while (!stops()) {
    try {
      const std::string next = came_key(round + 1);
      store_->wait(std::span(&next, 1), within(kWatchTime));
    } catch (const transport::StoreLost& error) {
      log_warning(concat("[rpc] nobody can join any more: ", error.what()));
      return;
    } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): nobody has said that it came
    }
    try {
      const std::string now = store_->get(kRound, within(kStoreTime));
      std::from_chars(now.data(), now.data() + now.size(), round);
      look();
    } catch (const CommError& error) {
      log_warning(concat("[rpc] nobody can join any more: ", error.what()));
      return;
    }
  }
}

void Membership::forget(const WorkerInfo& worker, uint64_t ticket) {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = peers_.find(ticket); found != peers_.end()) {
      thread = std::move(found->second.thread);
      found->second.state = Peer::State::kGone;
    }
  }
  if (thread.joinable()) thread.join();  // it has met the worker, so it has ended or is about to
  release_all(worker, ticket);
}

void Membership::release_all(const WorkerInfo& worker, uint64_t ticket) {
  try {
    release(concat("rpc/name/", worker.name), ticket);
    release(concat("rpc/id/", worker.id), ticket);
    if (store_->remove(member_key(ticket), ending())) store_->add(kDynamic, -1, ending());
  } catch (const CommError& error) {
    log_info(concat("[rpc] the store is gone: ", error.what()));
  }
}

void Membership::leave() {
  std::map<uint64_t, Peer> peers;
  {
    const std::lock_guard lock(mutex_);
    if (stops_) return;
    stops_ = true;
  }
  if (watcher_.joinable()) watcher_.join();
  {
    const std::lock_guard lock(mutex_);
    for (auto& [ticket, peer] : peers_) {
      if (peer.thread.joinable()) peers[ticket].thread = std::move(peer.thread);
    }
  }
  for (auto& [ticket, peer] : peers) peer.thread.join();
  release_all(own_, ticket_);
}

}  // namespace chorale::rpc
