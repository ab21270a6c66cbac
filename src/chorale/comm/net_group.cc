#include "chorale/comm/net_group.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

std::vector<int> ranks_elsewhere(const Membership& membership, const NetLayout& layout) {
  std::vector<int> ranks;
  for (int peer = 0; peer < membership.size(); ++peer) {
    if (!layout.is_here(peer)) ranks.push_back(membership.members[static_cast<size_t>(peer)]);
  }
  return ranks;
}

}  // namespace

NetGroup::NetGroup(const Membership& whose, NetLayout where, std::shared_ptr<NetHub> through, uint64_t which,
                   std::shared_ptr<ShmEngine> here)
    : membership(whose),
      layout(std::move(where)),
      hub(std::move(through)),
      id(which),
      local(std::move(here)),
      others_(ranks_elsewhere(whose, layout)),
      departures_(static_cast<size_t>(whose.size())) {
  hub->enlist(id, *this);
}

void NetGroup::leave(uint32_t last, bool threw) {
  hub->delist(id);
  if (failed()) return;  // they know
  hub->tell(others_, {threw ? NetNotice::Kind::kThrew : NetNotice::Kind::kLeft, global(rank()), id, uint64_t{last} + 1,
                      std::string()});
}

void NetGroup::hear(int from, const NetNotice& notice) {
  const auto at = std::lower_bound(membership.members.begin(), membership.members.end(), from);
  if (at == membership.members.end() || *at != from) return;
  if (notice.kind == NetNotice::Kind::kFailed) {
    record({from, notice.culprit, notice.text, notice.number, Clock::now()});
    return;
  }
  const std::lock_guard lock(mutex_);
  departures_[static_cast<size_t>(at - membership.members.begin())] =
      Departure{notice.kind == NetNotice::Kind::kThrew, notice.number, Clock::now()};
}

bool NetGroup::record(Failure failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    failure_ = std::move(failure);
    failed_.store(true, std::memory_order_release);
    if (failure_.number <= entered_) local->record_failure(failure_.text, failure_.culprit);
  }
  fabric().wake();
  return true;
}

void NetGroup::enter(uint32_t number) {
  const std::lock_guard lock(mutex_);
  entered_ = number;
  if (failed_.load(std::memory_order_relaxed) && failure_.number <= number)
    local->record_failure(failure_.text, failure_.culprit);
}

bool NetGroup::fails(uint32_t number) const {
  if (local->is_broken() && !failed_.load(std::memory_order_acquire)) return true;
  if (!failed_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  return failure_.number <= number || Clock::now() - failure_.heard > kInFlight;
}

NetGroup::Failure NetGroup::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return failure_;
  }
  const ShmEngine::Failure found = local->recorded_failure();
  return {found.reporter, found.culprit, found.text, 0, Clock::now()};
}

void NetGroup::fail(uint32_t number, const std::string& reason, int culprit) {
  if (record({global(rank()), culprit, reason, number, Clock::now()}))
    hub->tell(others_, {NetNotice::Kind::kFailed, culprit, id, number, reason});
}

void NetGroup::share_failure(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) local->record_failure(failure_.text, failure_.culprit);
  }
  const ShmEngine::Failure here = local->recorded_failure();
  if (here.reporter == global(rank())) fail(number, here.text, here.culprit);
}

std::optional<std::string> NetGroup::gone(int peer, uint32_t number) const {
  std::optional<Departure> departure;
  {
    const std::lock_guard lock(mutex_);
    departure = departures_[static_cast<size_t>(peer)];
  }
  const transport::Life life = fabric().life(global(peer));
  const std::string who = concat("rank ", global(peer), " (on another host)");
  if (departure) {
    const bool sent = number < departure->number && Clock::now() - departure->heard < kInFlight;
    if (sent && life.state != transport::Life::State::kLost) return std::nullopt;
    return concat(who, departure->threw ? " left the group because of an exception" : " has left the group", "; it ",
                  hub->where_is(life, id));
  }
  if (!life.gone()) return std::nullopt;
  return concat(who, life.state == transport::Life::State::kLeft ? " has left the job" : " is lost: ",
                life.state == transport::Life::State::kLeft ? std::string() : life.text, "; it ",
                hub->where_is(life, id));
}

std::string NetGroup::condition(int peer) const {
  const transport::Life life = fabric().life(global(peer));
  return concat("on another host, ", life.text.empty() ? std::string("connected") : life.text);
}

bool NetGroup::is_silent(int peer) const {
  return fabric().life(global(peer)).state == transport::Life::State::kSilent;
}

std::string NetGroup::where_is(int peer) const { return hub->where_is(fabric().life(global(peer)), id); }

}  // namespace chorale::comm
