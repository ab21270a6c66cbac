#include "chorale/comm/net_call.h"

#include <algorithm>
#include <cstring>
#include <iostream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using transport::Transfer;

constexpr Deadline::Clock::duration kLookInterval = 4ms;    // how often the reason for a wait is looked for
constexpr Deadline::Clock::duration kPollInterval = 200us;  // for what happens on this host and rings no bell
constexpr Deadline::Clock::duration kGrace = 300ms;         // Note [Who is to blame]
constexpr Deadline::Clock::duration kFirstWord = 5s;        // after which one says for whom one waits
// When one other call is known to differ, the rest is worth a short wait: it shows who is the odd one out.
constexpr Deadline::Clock::duration kDifferencePatience = 100ms;

static_assert(sizeof(Fingerprint) == 4 * sizeof(uint64_t));

}  // namespace

NetCall::NetCall(NetGroup& whose, Operation& what, Deadline deadline)
    : group(whose),
      operation(what),
      layout(whose.layout),
      sent_(static_cast<size_t>(whose.size())),
      received_(static_cast<size_t>(whose.size())),
      heard_(static_cast<size_t>(whose.size())),
      end_(deadline.end().time_since_epoch().count()),
      next_word_(what.issued + kFirstWord),
      word_interval_(kFirstWord) {}

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
    look(wanted);
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
      if (reason) throw CallFailed{*reason, group.global(posted.peer)};
      // It may have given up for a reason that we have not heard of yet.
      throw CallFailed{concat("rank ", group.global(posted.peer), " (on another host): ", posted.transfer->error,
                              "; it ", group.where_is(posted.peer)),
                       group.global(posted.peer), true};
    }
    if (posted.received) check(posted);
  }
  if (difference_since_) return false;
  return wanted ? !posted_[*wanted].open : open_.empty();
}

void NetCall::check(const Posted& posted) {
  const Transfer& transfer = *posted.transfer;
  Fingerprint print;
  std::memcpy(static_cast<void*>(&print), transfer.envelope.words.data(), sizeof(print));
  heard_[static_cast<size_t>(posted.peer)] = print;
  if (!(print == operation.print)) {
    if (!difference_since_) difference_since_ = Clock::now();
    return;
  }
  const int peer = group.global(posted.peer);
  const transport::Envelope expected = envelope(posted.step);
  if (transfer.envelope.words[5] != expected.words[5]) {
    throw CallFailed{concat("rank ", peer, " and rank ", group.global(group.rank()), " move the data of ",
                            describe(print), " in different ways; CHORALE_ALGORITHMS must be the same on all ranks"),
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

void NetCall::look_at_difference() {
  if (!difference_since_) return;
  bool all_leaders = layout.is_leader();
  for (int host = 0; host < layout.host_count() && all_leaders; ++host)
    all_leaders = host == layout.host || heard_[static_cast<size_t>(layout.leader_of(host))].has_value();
  if (!all_leaders && Clock::now() - *difference_since_ < kDifferencePatience) return;
  // Who was compared with its neighbours before made the call that its leader made.
  std::vector<Fingerprint> calls(static_cast<size_t>(group.size()));
  for (int peer = 0; peer < group.size(); ++peer) {
    const auto& own = heard_[static_cast<size_t>(peer)];
    const auto& leader = heard_[static_cast<size_t>(layout.leader_of(layout.host_of[static_cast<size_t>(peer)]))];
    calls[static_cast<size_t>(peer)] =
        layout.is_here(peer) ? operation.print : own.value_or(leader.value_or(Fingerprint{}));
  }
  try {
    raise_difference(group.membership, calls);
  } catch (CallFailed& failure) {
    failure.unsure = !all_leaders;
    throw;
  }
}

std::vector<int> NetCall::awaited() const {
  std::vector<int> peers;
  for (const Ticket ticket : open_) peers.push_back(posted_[ticket].peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::string NetCall::who_is(int peer) const {
  return concat("rank ", group.global(peer), " (", group.condition(peer), ") ", group.where_is(peer));
}

void NetCall::look(std::optional<Ticket> wanted) {
  if (group.fails(operation.number)) throw GroupFailed{};
  look_at_difference();
  const std::vector<int> missing = awaited();
  for (int peer : missing) {
    const auto reason = group.gone(peer, operation.number);
    if (!reason) continue;
    // Its last message may have come just before the notice.
    if (settle(wanted)) return;
    const std::vector<int> still = awaited();
    if (std::find(still.begin(), still.end(), peer) != still.end()) throw CallFailed{*reason, group.global(peer)};
  }
  const Clock::time_point now = Clock::now(), end{Clock::duration(end_.load())};
  if (now >= end && !missing.empty()) {
    const auto silent = std::find_if(missing.begin(), missing.end(), [&](int peer) { return group.is_silent(peer); });
    if (silent == missing.end() && now < end + kGrace) return;
    const int culprit = silent == missing.end() ? missing.front() : *silent;
    throw CallFailed{concat("timed out: nothing from rank ", group.global(culprit), " for ",
                            in_seconds(now - operation.issued), "; ", who_is(culprit)),
                     group.global(culprit)};
  }
  if (now >= next_word_) say_who_is_awaited();
}

void NetCall::say_who_is_awaited() {
  word_interval_ *= 2;
  next_word_ = operation.issued + word_interval_;
  std::string who;
  for (int peer : awaited()) who += concat(who.empty() ? "" : "; ", who_is(peer));
  if (who.empty()) return;
  // One write, so that lines of several ranks stay whole.
  std::cerr << concat("[", name_of(operation.kind), " #", operation.number, "] rank ", group.global(group.rank()),
                      " (group ", group.membership.name, " of ", group.size(), "): waiting since ",
                      in_seconds(Clock::now() - operation.issued), " for ", who, "\n")
            << std::flush;
}

// ---- this host

void NetCall::here(const Here& what) {
  const Intrusive<Operation> local = Operation::make();
  local->kind = what.kind;
  local->dtype = what.dtype;
  local->reduction = what.reduction;
  local->root = what.root;
  for (const Chunk& chunk : what.give) local->give.push_back(chunk);
  for (const Chunk& chunk : what.take) local->take.push_back(chunk);
  local->print = operation.print;
  local->issued = operation.issued;
  // Who is not there at the first call has not entered; later it may be held up elsewhere.
  local->grace = calls_here_ == 0 ? Clock::duration{} : kGrace;
  ++calls_here_;
  ShmEngine& engine = *group.local;
  try {
    {
      const std::lock_guard lock(engine.context().mutex);
      local->deadline = Deadline(Clock::time_point(Clock::duration(end_.load())));
      running_here_ = local;
      engine.submit(local);
    }
    wait(engine, *local, Deadline::never());
    const std::lock_guard lock(engine.context().mutex);
    running_here_ = {};
  } catch (const CommError&) {
    throw GroupFailed{};
  }
}

void NetCall::meet_here() {
  if (layout.local_size() > 1) here({.kind = CallKind::kBarrier, .give = {}, .take = {}});
}

// ---- one rank and another

namespace {
constexpr uint64_t kPresenceTag = 0x4920616d20686572;  // no caller's, one may hope
}

Intrusive<Operation> NetCall::message_here(CallKind kind, int peer) const {
  const Intrusive<Operation> local = Operation::make();
  local->kind = kind;
  local->print = operation.print;
  local->peer = layout.index_of[static_cast<size_t>(peer)];
  local->tag = kPresenceTag;
  local->issued = operation.issued;
  (kind == CallKind::kSend ? local->give : local->take).push_back({});
  return local;
}

void NetCall::submit_here(const Intrusive<Operation>& local) {
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

std::optional<std::string> NetCall::gone(int peer) const {
  if (!layout.is_here(peer)) return group.gone(peer, operation.number);
  const std::lock_guard lock(group.local->context().mutex);
  return group.local->gone(layout.index_of[static_cast<size_t>(peer)]);
}

bool NetCall::hear(int peer, Deadline deadline) {
  ShmEngine& engine = *group.local;
  Intrusive<Operation> message;
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
    look_at_difference();
    if (const auto reason = gone(peer)) {
      if (came()) return true;
      throw CallFailed{*reason, group.global(peer)};
    }
    if (deadline.passed()) return false;
    if (Clock::now() >= next_word_) say_who_is_awaited();
    group.fabric().await_event(seen, deadline.earlier(within(message ? kPollInterval : kLookInterval)));
  }
}

void NetCall::shorten(Deadline deadline) {
  const Clock::rep end = deadline.end().time_since_epoch().count();
  if (end >= end_.load()) return;
  end_.store(end);
  const std::lock_guard lock(group.local->context().mutex);
  if (running_here_) running_here_->deadline = running_here_->deadline.earlier(deadline);
}

}  // namespace chorale::comm
