#include "chorale/comm/net/net_group.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

std::vector<int> ranks_elsewhere(const Membership& membership, const NetLayout& layout) {
  std::vector<int> ranks;
  for (int peer = 0; peer < membership.size(); ++peer) {
    if (!layout.is_here(peer)) ranks.push_back(membership.global(peer));
  }
  return ranks;
}

}  // namespace

NetGroup::NetGroup(const Membership& whose, const AlgorithmTable& ways, NetLayout where,
                   std::shared_ptr<NetHub> through, uint64_t which, std::shared_ptr<ShmEngine> here)
    : membership(whose),
      table(ways),
      layout(std::move(where)),
      hub(std::move(through)),
      id(which),
      local(std::move(here)),
      others_(ranks_elsewhere(whose, layout)),
      answers_(static_cast<size_t>(whose.size())),
      departures_(static_cast<size_t>(whose.size())),
      thrown_(static_cast<size_t>(whose.size())) {
  hub->enlist(id, *this);
}

void NetGroup::note_exception(const std::string& what) {
  uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = entered_.number;
  }
  local->group().own().exception.set(number, what);
  hub->tell(others_, id, {.kind = Notice::Kind::kException, .number = number, .text = what});
}

void NetGroup::leave(uint32_t last, bool threw) {
  hub->delist(id);
  if (failed() || said_goodbye_) return;  // they know
  hub->tell(others_, id, {.kind = threw ? Notice::Kind::kThrew : Notice::Kind::kLeft, .number = uint64_t{last} + 1});
}

void NetGroup::say_goodbye(uint32_t last) {
  said_goodbye_ = true;
  local->say_goodbye();
  hub->tell(others_, id, {.kind = Notice::Kind::kLeft, .number = uint64_t{last} + 1});
}

NetGroup::Stay NetGroup::stay_of(int peer) const {
  if (layout.is_here(peer)) {
    const int here = layout.index_of[static_cast<size_t>(peer)];
    const auto state = local->group().segment.control(here).state.load();
    if (state == shm::RankState::kThrew) return Stay::kThrew;
    return state == shm::RankState::kLeft || local->group().is_dead(here) ? Stay::kLeft : Stay::kHere;
  }
  {
    const std::lock_guard lock(mutex_);
    const auto& departure = departures_[static_cast<size_t>(peer)];
    if (departure) return departure->threw ? Stay::kThrew : Stay::kLeft;
  }
  return fabric().life(global(peer)).gone() ? Stay::kLeft : Stay::kHere;
}

void NetGroup::hear(int from, const Notice& notice) {
  const int member = membership.find(from);
  if (member < 0) return;
  const auto peer = static_cast<size_t>(member);
  if (notice.kind == Notice::Kind::kFailed) {
    record({from, notice.whom, notice.text}, notice.number);
    return;
  }
  if (notice.kind == Notice::Kind::kAsk) {
    const Whereabouts own = whereabouts(rank());
    hub->tell({&from, 1}, id, {.kind = Notice::Kind::kAnswer, .number = own.number, .print = own.print});
    return;
  }
  const std::lock_guard lock(mutex_);
  if (notice.kind == Notice::Kind::kAnswer) {
    answers_[peer] = {{static_cast<uint32_t>(notice.number), notice.print}, Clock::now()};
    return;
  }
  if (notice.kind == Notice::Kind::kException) {
    thrown_[peer] = {static_cast<uint32_t>(notice.number), notice.text};
    return;
  }
  if (notice.kind != Notice::Kind::kLeft && notice.kind != Notice::Kind::kThrew) return;
  departures_[peer] = Departure{notice.kind == Notice::Kind::kThrew, notice.number, Clock::now()};
}

bool NetGroup::record(Failure failure, uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    failure_ = std::move(failure);
    failed_in_ = number;
    heard_ = Clock::now();
    failed_.store(true, std::memory_order_release);
    if (failed_in_ <= entered_.number) local->publish_failure(failure_.text, failure_.culprit);
  }
  fabric().wake();
  return true;
}

void NetGroup::enter(uint32_t number, const Fingerprint& print) {
  local->group().own().outer.enter(number, print.words());
  hub->note_call(id, number, print);
  const std::lock_guard lock(mutex_);
  entered_ = {number, print};
  if (failed_.load(std::memory_order_relaxed) && failed_in_ <= number)
    local->publish_failure(failure_.text, failure_.culprit);
}

bool NetGroup::fails(uint32_t number) const {
  if (local->is_broken() && !failed_.load(std::memory_order_acquire)) return true;
  if (!failed_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  return failed_in_ <= number || Clock::now() - heard_ > kInFlight;
}

Failure NetGroup::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return failure_;
  }
  return local->recorded_failure();
}

void NetGroup::fail(uint32_t number, const std::string& reason, int culprit) {
  if (record({global(rank()), culprit, reason}, number))
    hub->tell(others_, id, {.kind = Notice::Kind::kFailed, .whom = culprit, .number = number, .text = reason});
}

void NetGroup::share_failure(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) local->publish_failure(failure_.text, failure_.culprit);
  }
  const Failure here = local->recorded_failure();
  if (here.reporter == global(rank())) fail(number, here.text, here.culprit);
}

std::optional<CallFailed> NetGroup::gone(int peer, uint32_t number) const {
  if (layout.is_here(peer)) {
    const std::lock_guard lock(local->context().mutex);
    return local->gone(layout.index_of[static_cast<size_t>(peer)]);
  }
  using State = transport::Life::State;
  std::optional<Departure> departure;
  {
    const std::lock_guard lock(mutex_);
    departure = departures_[static_cast<size_t>(peer)];
  }
  const transport::Life life = fabric().life(global(peer));
  std::string how;
  if (departure) {
    const bool sent = number < departure->number && Clock::now() - departure->heard < kInFlight;
    if (sent && life.state != State::kLost) return std::nullopt;
    how = departure->threw ? " left the group because of an exception" : " has left the group";
  } else if (life.gone()) {
    how = life.state == State::kLeft ? " has left the job" : concat(" is lost: ", life.text);
  } else {
    return std::nullopt;
  }
  if (auto accused = accusation()) return accused;  // then others leave because of that
  // A rank that leaves the job without a word to the group knows that it has failed: the rank that found out tells us
  // why.
  const bool unsure = !departure && life.state == State::kLeft;
  if (unsure) {
    if (auto lost = lost_one()) return lost;
  }
  return CallFailed{concat(elsewhere(global(peer)), how, "; it ", where_is(peer)), global(peer), unsure};
}

std::optional<CallFailed> NetGroup::lost_one() const {
  for (int other : others_) {
    const transport::Life life = fabric().life(other);
    if (life.state == transport::Life::State::kLost)
      return CallFailed{concat(elsewhere(other), " is lost: ", life.text, "; it ", where_is(membership.find(other))),
                        other};
  }
  return std::nullopt;
}

std::optional<CallFailed> NetGroup::accusation() const {
  for (int other : others_) {
    const transport::Life accuser = fabric().life(other);
    if (accuser.accuses) return CallFailed{concat(elsewhere(other), " is lost: ", accuser.text), global(rank())};
  }
  return std::nullopt;
}

bool NetGroup::is_silent(int peer) const {
  return fabric().life(global(peer)).state == transport::Life::State::kSilent;
}

bool NetGroup::is_stopped_here(int peer) const {
  return local->group().is_stopped(layout.index_of[static_cast<size_t>(peer)]);
}

NetGroup::Whereabouts NetGroup::whereabouts(int peer) const {
  Whereabouts where;
  if (layout.is_here(peer)) {
    Fingerprint::Words call;
    where.number = local->group().segment.control(layout.index_of[static_cast<size_t>(peer)]).outer.read(call);
    where.print = Fingerprint::of(call);
    return where;
  }
  where.number = NetHub::last_call(fabric().life(global(peer)), id, where.print);
  const std::lock_guard lock(mutex_);
  const Whereabouts& answer = answers_[static_cast<size_t>(peer)].where;
  return static_cast<int32_t>(answer.number - where.number) > 0 ? answer : where;
}

void NetGroup::ask_where() const { hub->tell(others_, id, {.kind = Notice::Kind::kAsk}); }

bool NetGroup::has_answered(int peer, Clock::time_point since) const {
  const std::lock_guard lock(mutex_);
  return answers_[static_cast<size_t>(peer)].heard >= since;
}

std::string NetGroup::where_is(int peer) const {
  const Whereabouts where = whereabouts(peer);
  std::string thrown;
  if (layout.is_here(peer)) {
    const int here = layout.index_of[static_cast<size_t>(peer)];
    thrown = local->group().segment.control(here).exception.since(where.number);
  } else {
    const std::lock_guard lock(mutex_);
    const Thrown& told = thrown_[static_cast<size_t>(peer)];
    if (static_cast<int32_t>(told.number - where.number) >= 0) thrown = told.text;
  }
  return where_and_thrown(describe_call(where), thrown);
}

std::string NetGroup::describe_call(const Whereabouts& where) const {
  return where.number == 0 ? std::string() : concat(describe(membership, where.print), " #", where.number);
}

std::string NetGroup::why_it_leaves(uint32_t finished) const {
  const Whereabouts where = whereabouts(rank());
  const auto& exception = local->group().own().exception;
  std::string thrown = exception.since(where.number);
  if (thrown.empty()) thrown = exception.since(finished);  // it was noted before the call that runs was entered
  return concat("rank ", global(rank()), " left the group because of an exception; it ",
                where_and_thrown(describe_call(where), thrown));
}

std::string NetGroup::elsewhere(int global_rank) const {
  return concat("rank ", global_rank, " (on another host, ", fabric().life(global_rank).address, ")");
}

std::string NetGroup::who_is(int peer) const {
  std::string condition;
  if (layout.is_here(peer)) {
    condition = local->group().condition(layout.index_of[static_cast<size_t>(peer)]);
  } else {
    const transport::Life life = fabric().life(global(peer));
    condition = concat("on another host, ", life.address, ", ", life.text.empty() ? "connected" : life.text);
  }
  return concat("rank ", global(peer), " (", condition, ") ", where_is(peer));
}

}  // namespace chorale::comm
