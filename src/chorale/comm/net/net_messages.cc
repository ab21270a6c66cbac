#include "chorale/comm/net/net_messages.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using transport::Transfer;

}  // namespace

uint64_t NetMessages::channel(const Operation& operation) const {
  // Mixed so that neighbouring tags of neighbouring groups do not meet (SplitMix64's last steps).
  uint64_t x = group_.id ^ (operation.tag + 1) * (operation.is_parcel ? 0xd1342543de82ef95u : 0x9e3779b97f4a7c15u);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

base::Intrusive<Operation> NetMessages::local_form(const Operation& operation) const {
  const base::Intrusive<Operation> local = Operation::make();
  local->kind = operation.kind;
  local->dtype = operation.dtype;
  local->print = operation.print;
  local->give = operation.give;
  local->take = operation.take;
  local->tag = operation.tag;
  local->peer = operation.peer < 0 ? -1 : group_.layout.index_of[static_cast<size_t>(operation.peer)];
  local->issued = operation.issued;
  local->is_parcel = operation.is_parcel;
  local->most_bytes = operation.most_bytes;
  return local;
}

void NetMessages::submit_here(Pending& pending) {
  pending.here = local_form(*pending.operation);
  const std::lock_guard lock(group_.local->context().mutex);
  try {
    group_.local->submit(pending.here);
  } catch (const CommError&) {
    throw GroupFailed{};
  }
}

// Elsewhere nothing is asked for before a parcel is there: its size is not known.
void NetMessages::look_for_parcel(Pending& pending) {
  const int peer = pending.operation->peer;
  pending.transfer = nullptr;
  pending.here = {};
  if (peer < 0 || group_.layout.is_here(peer)) submit_here(pending);
}

bool NetMessages::find_parcel(Pending& pending) {
  Operation& receive = *pending.operation;
  const int from = receive.peer < 0 ? transport::Fabric::kAnySource : group_.global(receive.peer);
  const auto found = group_.fabric().find(from, channel(receive));
  if (!found) return false;
  if (pending.here) {
    const std::lock_guard lock(group_.local->context().mutex);
    if (!pending.here->pending() || !group_.local->withdraw(*pending.here)) return false;  // a neighbour was faster
    pending.here = {};
  }
  receive.source = group_.membership.find(found->source);
  try {
    const Chunk into = room_for_parcel(group_.membership, receive, receive.source, found->bytes);
    pending.transfer = group_.fabric().receive(found->source, channel(receive), {into.data, into.bytes});
  } catch (const CallFailed&) {
    group_.fabric().receive(found->source, channel(receive), {});  // of another size: thrown away
    throw;
  }
  return true;
}

void NetMessages::submit(const base::Intrusive<Operation>& operation) {
  Pending pending{operation, nullptr, {}};
  const bool sends = operation->kind == CallKind::kSend;
  if (operation->is_parcel && !sends) {
    look_for_parcel(pending);
  } else if (operation->peer >= 0 && group_.layout.is_here(operation->peer)) {
    submit_here(pending);
  } else if (sends) {
    transport::Envelope envelope;
    std::memcpy(envelope.words.data(), &operation->print, sizeof(operation->print));
    const Chunk& data = operation->give[0];
    pending.transfer =
        group_.fabric().send(group_.global(operation->peer), channel(*operation), envelope, {data.data, data.bytes});
  } else {
    const Chunk& into = operation->take[0];
    const int from = operation->peer < 0 ? transport::Fabric::kAnySource : group_.global(operation->peer);
    pending.transfer = group_.fabric().receive(from, channel(*operation), {into.data, into.bytes});
    if (operation->peer < 0) pending.here = local_form(*operation);
  }
  pending_.push_back(std::move(pending));
}

void NetMessages::check(const Operation& receive, const Transfer& transfer) const {
  Fingerprint print;
  std::memcpy(static_cast<void*>(&print), transfer.envelope.words.data(), sizeof(print));
  const auto dtype = static_cast<DType>(print.dtype);
  CHORALE_CHECK(print.dtype < kDTypeCount, "rank ", transfer.source, " sent a message of dtype ", int{print.dtype});
  if (transfer.bytes != receive.take[0].bytes || dtype != receive.dtype)
    raise_misfit(group_.membership, receive.source, transfer.bytes, dtype, receive);
}

bool NetMessages::is_here_done(Pending& pending) {
  Operation& operation = *pending.operation;
  const Operation& here = *pending.here;
  if (here.pending()) return false;
  if (here.error) {
    if (!operation.is_parcel || group_.local->is_broken()) throw GroupFailed{};
    try {
      std::rethrow_exception(here.error);
    } catch (const CommError& error) {
      throw CallFailed{error.what(), error.failure().peer};
    }
  }
  if (here.source >= 0) operation.source = group_.layout.neighbours()[static_cast<size_t>(here.source)];
  if (operation.is_parcel) operation.results = here.results;
  return true;
}

bool NetMessages::is_done(Pending& pending) {
  Operation& operation = *pending.operation;
  const auto& neighbours = group_.layout.neighbours();
  const bool receives_parcel = operation.is_parcel && operation.kind == CallKind::kRecv;
  if (receives_parcel && !pending.transfer && !(pending.here && !pending.here->pending())) {
    const bool elsewhere = operation.peer < 0 || !group_.layout.is_here(operation.peer);
    if (elsewhere) find_parcel(pending);
    if (!pending.transfer && !pending.here) return false;
  }
  if (!pending.transfer) return is_here_done(pending);
  if (pending.here && pending.transfer->pending()) {
    // The receive takes from any source. The message of a neighbour stays where it is until the fabric has let go of
    // the memory.
    const std::lock_guard lock(group_.local->context().mutex);
    const base::Intrusive<Operation> probe = local_form(operation);
    if (group_.local->has_message(*probe) && group_.fabric().withdraw(pending.transfer)) {
      if (!group_.local->take_message(probe)) throw GroupFailed{};
      operation.source = neighbours[static_cast<size_t>(probe->source)];
      return true;
    }
  }
  const Transfer& transfer = *pending.transfer;
  if (transfer.pending()) return false;
  if (transfer.state() == Transfer::State::kFailed) {
    if (receives_parcel) {
      // Its sender has taken it back, or is gone, which is noticed elsewhere: there may be others.
      look_for_parcel(pending);
      return false;
    }
    const int peer = operation.peer;
    const int culprit = peer < 0 ? transfer.source : group_.global(peer);
    const auto reason = peer < 0 ? std::nullopt : group_.gone(peer, ~uint32_t{0});
    const CallFailed known =
        reason.value_or(CallFailed{concat(group_.elsewhere(culprit), ": ", transfer.error), culprit, true});
    if (operation.is_parcel) throw CallFailed(known);
    raise_when_sure(operation, known);
    return false;
  }
  if (operation.kind == CallKind::kRecv) {
    operation.source = group_.membership.find(transfer.source);
    if (!operation.is_parcel) check(operation, transfer);
  }
  return true;
}

void NetMessages::progress(std::vector<base::Intrusive<Operation>>& done) {
  if (group_.fails()) throw GroupFailed{};
  {
    const std::lock_guard lock(group_.local->context().mutex);
    if (!group_.local->idle()) group_.local->progress();
  }
  for (auto at = pending_.begin(); at != pending_.end();) {
    try {
      if (!is_done(*at)) {
        ++at;
        continue;
      }
      done.push_back(at->operation);
    } catch (const CallFailed& failure) {
      if (!at->operation->is_parcel) throw;
      failed_.emplace_back(at->operation, failure);
    }
    at = pending_.erase(at);
  }
}

NetInquiry& NetMessages::inquiry(const Operation& operation) {
  const auto pending = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& one) { return one.operation.get() == &operation; });
  CHORALE_INVARIANT(pending != pending_.end(), "a message that is not in flight is awaited");
  if (!pending->inquiry) pending->inquiry = std::make_unique<NetInquiry>(group_);
  return *pending->inquiry;
}

void NetMessages::let_go(const Pending& pending) {
  if (pending.transfer) group_.fabric().cancel(pending.transfer);
  if (!pending.here || !pending.operation->is_parcel) return;
  const std::lock_guard lock(group_.local->context().mutex);
  group_.local->withdraw(*pending.here);
}

bool NetMessages::remove(const Operation& parcel) {
  const auto found = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const Pending& pending) { return pending.operation.get() == &parcel; });
  if (found == pending_.end()) return false;
  // A neighbour may be handing one over just now.
  const bool takes_here = found->here && parcel.kind == CallKind::kRecv;
  if (takes_here) {
    const std::lock_guard lock(group_.local->context().mutex);
    if (!group_.local->withdraw(*found->here)) return false;
    found->here = {};
  }
  let_go(*found);
  pending_.erase(found);
  return true;
}

std::vector<base::Intrusive<Operation>> NetMessages::abandon() {
  std::vector<base::Intrusive<Operation>> all;
  for (const Pending& pending : pending_) {
    let_go(pending);
    all.push_back(pending.operation);
  }
  pending_.clear();
  return all;
}

}  // namespace chorale::comm
