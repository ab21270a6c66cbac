#include "chorale/comm/net/net_call.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using transport::Transfer;

constexpr Deadline::Clock::duration kLookInterval = 4ms;    // how often the reason for a wait is looked for
constexpr Deadline::Clock::duration kPollInterval = 200us;  // events on this host may ring no bell
constexpr int64_t kRoundsBeforeLook = 64;                   // most waits for neighbours are over by then

}  // namespace

NetCall::NetCall(NetGroup& whose, Operation& what, Deadline deadline)
    : group(whose),
      operation(what),
      layout(whose.layout),
      sent_(static_cast<size_t>(whose.size())),
      received_(static_cast<size_t>(whose.size())),
      inquiry_(whose, what.number, what.print),
      end_(deadline.end().time_since_epoch().count()) {}

NetCall::~NetCall() {
  for (const Ticket ticket : open_) group.fabric().cancel(posted_[ticket].transfer);
}

const Tensor& NetCall::buffer(int64_t elems, DType dtype) {
  return buffers_.emplace_back(Tensor::empty({elems}, dtype));
}

// ---- other hosts

transport::Envelope NetCall::envelope(uint32_t step) const {
  transport::Envelope envelope;
  std::memcpy(envelope.words.data(), &operation.print, sizeof(operation.print));
  envelope.words[4] = uint64_t{step} << 32 | operation.number;
  envelope.words[5] = algorithm_;
  return envelope;
}

NetCall::Ticket NetCall::post(Posted posted) {
  posted_.push_back(std::move(posted));
  open_.push_back(posted_.size() - 1);
  return open_.back();
}

NetCall::Ticket NetCall::send(int peer, Chunk data) {
  const uint32_t step = sent_[static_cast<size_t>(peer)]++;
  return post({group.fabric().send(group.global(peer), group.id, envelope(step), {data.data, data.bytes}), peer, step,
               data.bytes, false});
}

NetCall::Ticket NetCall::receive(int peer, Chunk into) {
  const uint32_t step = received_[static_cast<size_t>(peer)]++;
  return post(
      {group.fabric().receive(group.global(peer), group.id, {into.data, into.bytes}), peer, step, into.bytes, true});
}

void NetCall::greet() {
  if (!layout.is_leader()) return;
  for (int host = 0; host < layout.host_count(); ++host) {
    if (host == layout.host) continue;
    send(layout.leader_of(host), {});
    receive(layout.leader_of(host), {});
  }
}

void NetCall::await(Ticket ticket) { wait_for(ticket); }
void NetCall::await_all() {
  wait_for(std::nullopt);
  posted_.clear();
}

void NetCall::wait_for(std::optional<Ticket> wanted) {
  for (;;) {
    const uint32_t seen = group.fabric().events();
    if (settle(wanted)) return;
    look(wanted, {});
    group.fabric().await_event(seen, within(kLookInterval));
  }
}

bool NetCall::settle(std::optional<Ticket> wanted) {
  for (size_t i = 0; i < open_.size();) {
    Posted& posted = posted_[open_[i]];
    const Transfer::State state = posted.transfer->state();
    if (state == Transfer::State::kPending) {
      ++i;
      continue;
    }
    posted.open = false;
    open_.erase(open_.begin() + static_cast<ptrdiff_t>(i));
    if (state == Transfer::State::kFailed) {
      if (group.fails(operation.number)) throw GroupFailed{};
      const auto reason = group.gone(posted.peer, operation.number);
      if (reason) throw CallFailed(*reason);
      // It may have given up for a reason that we have not heard of yet.
      throw CallFailed{concat("a message failed: ", posted.transfer->error, "; ", group.who_is(posted.peer)),
                       group.global(posted.peer), true};
    }
    if (posted.received) check(posted);
  }
  if (inquiry_.differs()) return false;
  return wanted ? !posted_[*wanted].open : open_.empty();
}

void NetCall::check(const Posted& posted) {
  const Transfer& transfer = *posted.transfer;
  Fingerprint print;
  std::memcpy(static_cast<void*>(&print), transfer.envelope.words.data(), sizeof(print));
  inquiry_.note(posted.peer, print);
  if (inquiry_.differs()) return;
  const int peer = group.global(posted.peer);
  const transport::Envelope expected = envelope(posted.step);
  if (transfer.envelope.words[5] != expected.words[5]) {
    throw CallFailed{concat("rank ", peer, " and rank ", group.global(group.rank()), " move the data of ",
                            describe(group.membership, print),
                            " in different ways; CHORALE_ALGORITHMS must be the same on all ranks"),
                     peer};
  }
  if (transfer.envelope != expected) {
    throw CallFailed{concat("rank ", peer, " sent message ", transfer.envelope.words[4] >> 32, " of its call #",
                            static_cast<uint32_t>(transfer.envelope.words[4]), " where rank ",
                            group.global(group.rank()), " expects message ", posted.step, " of #", operation.number),
                     peer, true};
  }
  if (transfer.bytes != posted.bytes) {
    throw CallFailed{concat("rank ", peer, " gives ", transfer.bytes, " bytes where rank ", group.global(group.rank()),
                            " takes ", posted.bytes, ": the sizes of the chunks do not fit"),
                     peer};
  }
}

std::vector<int> NetCall::awaited() const {
  std::vector<int> peers;
  for (const Ticket ticket : open_) peers.push_back(posted_[ticket].peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

void NetCall::look(std::optional<Ticket> wanted, std::span<const int> here) {
  if (group.fails(operation.number)) throw GroupFailed{};
  std::vector<int> missing = awaited();
  inquiry_.look_at_calls(missing);
  for (int peer : missing) {
    const auto reason = group.gone(peer, operation.number);
    if (!reason) continue;
    // Its last message may have come just before the notice.
    if (settle(wanted)) return;
    const std::vector<int> still = awaited();
    if (std::find(still.begin(), still.end(), peer) != still.end()) throw CallFailed(*reason);
  }
  if (Clock::now() >= Clock::time_point(Clock::duration(end_.load()))) {
    missing.insert(missing.end(), here.begin(), here.end());
    const auto culprit = inquiry_.find_culprit(missing);
    if (culprit)
      raise_timeout(group.membership, operation, *culprit, *culprit < 0 ? std::string() : group.who_is(*culprit));
  }
  group.stop_watch.look(
      group.membership, operation, -1, [this](int peer) { return group.is_stopped(peer); },
      [this](int peer) { return group.who_is(peer); });
  // The engine of this host says it of the ranks here.
  if (word_.is_due(operation)) say_who_is_awaited(missing);
}

void NetCall::say_who_is_awaited(std::span<const int> peers) {
  std::vector<std::string> who;
  who.reserve(peers.size());
  for (int peer : peers) who.push_back(group.who_is(peer));
  word_.say(group.membership, operation, who);
}

// ---- this host

void NetCall::here(const Here& what) {
  const base::Intrusive<Operation> local = Operation::make();
  local->kind = what.kind;
  local->dtype = what.dtype;
  local->reduction = what.reduction;
  local->root = what.root;
  for (const Chunk& chunk : what.give) local->give.push_back(chunk);
  for (const Chunk& chunk : what.take) local->take.push_back(chunk);
  local->print = operation.print;
  local->issued = operation.issued;
  ShmEngine& engine = *group.local;
  std::unique_lock lock(engine.context().mutex);
  try {
    engine.submit(local);
  } catch (const CommError&) {
    throw GroupFailed{};
  }
  Clock::time_point next_look = Clock::now() + kLookInterval;
  for (Wait wait(*local, Deadline::never()); local->pending();) {
    engine.progress();
    if (!local->pending()) break;
    engine.wait_a_little(lock, wait);
    if (wait.rounds <= kRoundsBeforeLook || Clock::now() < next_look) continue;
    std::vector<int> missing = engine.awaited(*local);
    for (int& peer : missing) peer = layout.neighbours()[static_cast<size_t>(peer)];
    lock.unlock();
    look(std::nullopt, missing);
    lock.lock();
    next_look = Clock::now() + kLookInterval;
  }
  if (local->error) throw GroupFailed{};
}

void NetCall::meet_here() {
  if (layout.local_size() > 1) here({.kind = CallKind::kBarrier, .give = {}, .take = {}});
}

// ---- one rank and another

namespace {
constexpr uint64_t kPresenceTag = 0x4920616d20686572;  // no caller's, one may hope
}

base::Intrusive<Operation> NetCall::message_here(CallKind kind, int peer) const {
  const base::Intrusive<Operation> local = Operation::make();
  local->kind = kind;
  local->print = operation.print;
  local->peer = layout.index_of[static_cast<size_t>(peer)];
  local->tag = kPresenceTag;
  local->issued = operation.issued;
  (kind == CallKind::kSend ? local->give : local->take).push_back({});
  return local;
}

void NetCall::submit_here(const base::Intrusive<Operation>& local) {
  const std::lock_guard lock(group.local->context().mutex);
  try {
    group.local->submit(local);
  } catch (const CommError&) {
    throw GroupFailed{};
  }
}

void NetCall::tell(int peer) {
  if (layout.is_here(peer)) {
    submit_here(message_here(CallKind::kSend, peer));
  } else {
    send(peer, {});
  }
}

bool NetCall::hear(int peer, Deadline deadline) {
  ShmEngine& engine = *group.local;
  base::Intrusive<Operation> message;
  Ticket ticket = 0;
  if (layout.is_here(peer)) {
    message = message_here(CallKind::kRecv, peer);
    submit_here(message);
  } else {
    ticket = receive(peer, {});
  }
  const auto came = [&] {
    if (!message) return settle(ticket);
    const std::lock_guard lock(engine.context().mutex);
    engine.progress();
    return message->state.load() == Operation::State::kDone;
  };
  for (;;) {
    const uint32_t seen = group.fabric().events();
    if (came()) return true;
    if (group.fails(operation.number)) throw GroupFailed{};
    inquiry_.look_at_calls({&peer, 1});
    if (const auto reason = group.gone(peer, operation.number)) {
      if (came()) return true;
      throw CallFailed(*reason);
    }
    if (deadline.passed()) return false;
    if (word_.is_due(operation)) say_who_is_awaited({&peer, 1});
    group.fabric().await_event(seen, deadline.earlier(within(message ? kPollInterval : kLookInterval)));
  }
}

void NetCall::shorten(Deadline deadline) {
  const Clock::rep end = deadline.end().time_since_epoch().count();
  if (end >= end_.load()) return;
  end_.store(end);
}

}  // namespace chorale::comm
