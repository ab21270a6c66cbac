#include "chorale/comm/net/net_messages.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using transport::Transfer;

}  // namespace

uint64_t NetMessages::channel(uint64_t tag) const {
  // Mixed so that neighbouring tags of neighbouring groups do not meet (SplitMix64's last steps).
  uint64_t x = group_.id ^ (tag + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

Intrusive<Operation> NetMessages::local_form(const Operation& operation) const {
  const Intrusive<Operation> local = Operation::make();
  local->kind = operation.kind;
  local->dtype = operation.dtype;
  local->print = operation.print;
  local->give = operation.give;
  local->take = operation.take;
  local->tag = operation.tag;
  local->peer = operation.peer < 0 ? -1 : group_.layout.index_of[static_cast<size_t>(operation.peer)];
  local->issued = operation.issued;
  return local;
}

void NetMessages::submit(const Intrusive<Operation>& operation) {
  Pending pending{operation, nullptr, {}};
  const bool sends = operation->kind == CallKind::kSend;
  if (operation->peer >= 0 && group_.layout.is_here(operation->peer)) {
    pending.here = local_form(*operation);
    const std::lock_guard lock(group_.local->context().mutex);
    try {
      group_.local->submit(pending.here);
    } catch (const CommError&) {
      throw GroupFailed{};
    }
  } else if (sends) {
    transport::Envelope envelope;
    std::memcpy(envelope.words.data(), &operation->print, sizeof(operation->print));
    const Chunk& data = operation->give[0];
    pending.transfer = group_.fabric().send(group_.global(operation->peer), channel(operation->tag), envelope,
                                            {data.data, data.bytes});
  } else {
    const Chunk& into = operation->take[0];
    const int from = operation->peer < 0 ? transport::Fabric::kAnySource : group_.global(operation->peer);
    pending.transfer = group_.fabric().receive(from, channel(operation->tag), {into.data, into.bytes});
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

bool NetMessages::is_done(Pending& pending) {
  Operation& operation = *pending.operation;
  const auto& neighbours = group_.layout.neighbours();
  if (!pending.transfer) {
    if (pending.here->pending()) return false;
    if (pending.here->error) throw GroupFailed{};
    if (pending.here->source >= 0) operation.source = neighbours[static_cast<size_t>(pending.here->source)];
    return true;
  }
  if (pending.here && pending.transfer->pending()) {
    // From any source. The message of a neighbour stays where it is until the fabric has let go of the memory.
    const std::lock_guard lock(group_.local->context().mutex);
    const Intrusive<Operation> probe = local_form(operation);
    if (group_.local->has_message(*probe) && group_.fabric().withdraw(pending.transfer)) {
      if (!group_.local->take_message(*probe)) throw GroupFailed{};
      operation.source = neighbours[static_cast<size_t>(probe->source)];
      return true;
    }
  }
  const Transfer& transfer = *pending.transfer;
  if (transfer.pending()) return false;
  if (transfer.state() == Transfer::State::kFailed) {
    const int peer = operation.peer;
    const int culprit = peer < 0 ? transfer.source : group_.global(peer);
    const auto reason = peer < 0 ? std::nullopt : group_.gone(peer, ~uint32_t{0});
    raise_when_sure(
        operation, reason.value_or(CallFailed{concat(group_.elsewhere(culprit), ": ", transfer.error), culprit, true}));
    return false;
  }
  if (operation.kind == CallKind::kRecv) {
    operation.source = group_.membership.find(transfer.source);
    check(operation, transfer);
  }
  return true;
}

void NetMessages::progress(std::vector<Intrusive<Operation>>& done) {
  if (group_.fails()) throw GroupFailed{};
  {
    const std::lock_guard lock(group_.local->context().mutex);
    if (!group_.local->idle()) group_.local->progress();
  }
  for (auto at = pending_.begin(); at != pending_.end();) {
    if (is_done(*at)) {
      done.push_back(at->operation);
      at = pending_.erase(at);
    } else {
      ++at;
    }
  }
}

NetInquiry& NetMessages::inquiry(const Operation& operation) {
  const auto pending = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& one) { return one.operation.get() == &operation; });
  CHORALE_INVARIANT(pending != pending_.end(), "a message that is not in flight is awaited");
  if (!pending->inquiry) pending->inquiry = std::make_unique<NetInquiry>(group_);
  return *pending->inquiry;
}

std::vector<Intrusive<Operation>> NetMessages::abandon() {
  std::vector<Intrusive<Operation>> all;
  for (const Pending& pending : pending_) {
    if (pending.transfer) group_.fabric().cancel(pending.transfer);
    all.push_back(pending.operation);
  }
  pending_.clear();
  return all;
}

}  // namespace chorale::comm
