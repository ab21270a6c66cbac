#include "chorale/comm/shm/shm_engine.h"

#include <sched.h>

#include <algorithm>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// A peer that lives is not looked at again for so long: the look enters the kernel, and every parcel begins with one.
constexpr auto kAliveTime = 50us;

// Takes the line from the caches of ranks that have read it before it is written, without waiting for it.
void own_soon(const void* line) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line))); }

}  // namespace

ShmEngine::ShmEngine(std::shared_ptr<RankContext> whose_context, Membership whose, shm::GroupSegment segment,
                     const std::vector<ShmIdentity>& identities, bool inner)
    : Engine(std::move(whose_context), std::move(whose)),
      group_(context(), membership(), std::move(segment), identities, inner),
      call_(group_, roll_call_),
      messages_(group_),
      shares_process_(share_this_process(identities)),
      seen_alive_(static_cast<size_t>(group_.size)) {
  group_.own().state.store(shm::RankState::kJoined);
  enlist();
}

ShmEngine::~ShmEngine() {
  {
    std::unique_lock lock(context().mutex);
    drain(lock);
    end_the_rest();
    delist();
  }
  if (!said_goodbye_)
    group_.segment.publish(group_.own().state, is_thrown_away() ? shm::RankState::kThrew : shm::RankState::kLeft);
}

bool ShmEngine::step(const base::Intrusive<Operation>& operation, bool is_new) {
  if (is_new) call_.enter(*operation);
  if (!call_.step()) return false;
  own_soon(&group_.segment.slot(group_.rank, operation->number + 1));
  call_.leave();
  return true;
}

bool ShmEngine::has_message(Operation& receive) {
  bool found = false;
  guarded(receive, [&] { found = messages_.has_message(receive); });
  note_messages();
  return found;
}
bool ShmEngine::take_message(const base::Intrusive<Operation>& receive) {
  bool found = false;
  guarded(*receive, [&] { found = messages_.take_message(receive); });
  note_messages();
  return found;
}

// ---- waiting

void ShmEngine::sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) {
  group_.segment.sleep(group_.rank, std::chrono::nanoseconds(at_most).count() + 1, [&] {
    progress();
    lock.unlock();
    return !operation.pending();
  });
  lock.lock();
}

std::vector<int> ShmEngine::awaited_by_call(const Operation&) const {
  return call_.entered() ? call_.missing() : std::vector<int>();
}

bool ShmEngine::is_gone(int peer) const {
  const auto state = group_.segment.control(peer).state.load();
  if (state == shm::RankState::kLeft || state == shm::RankState::kThrew) return true;
  Clock::time_point& seen = seen_alive_[static_cast<size_t>(peer)];
  const auto now = Clock::now();
  if (now - seen < kAliveTime) return false;
  if (group_.is_dead(peer)) return true;
  seen = now;
  return false;
}

std::optional<CallFailed> ShmEngine::gone(int peer) const {
  if (!is_gone(peer)) return std::nullopt;
  const auto state = group_.segment.control(peer).state.load();
  const char* how = state == shm::RankState::kThrew  ? " left the group because of an exception"
                    : state == shm::RankState::kLeft ? " has left the group"
                                                     : " has ended: killed, crashed or exited";
  return CallFailed{
      concat("rank ", group_.global(peer), " (", group_.condition(peer), ")", how, "; it ", where_is(peer)),
      group_.global(peer)};
}

// An awaited rank may itself wait for a rank that is stopped: then the stopped one is to blame.
std::optional<int> ShmEngine::find_culprit(const Operation&, const std::vector<int>& missing) {
  const auto is_stopped = [&](int peer) { return group_.is_stopped(peer); };
  const auto awaited = std::find_if(missing.begin(), missing.end(), is_stopped);
  if (awaited != missing.end()) return *awaited;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (is_stopped(peer)) return peer;
  }
  return missing.empty() ? -1 : missing.front();
}

std::string ShmEngine::who_is(int peer) const {
  return concat("rank ", group_.global(peer), " (", group_.condition(peer), ") ", where_is(peer));
}

const shm::CallSlot* ShmEngine::last_call(int peer) const {
  const auto& slots = group_.segment.control(peer).slots;
  const uint32_t even = slots[0].number.load(std::memory_order_acquire);
  const uint32_t odd = slots[1].number.load(std::memory_order_acquire);
  const shm::CallSlot& last = slots[static_cast<int32_t>(odd - even) > 0 ? 1 : 0];
  return even == 0 && odd == 0 ? nullptr : &last;
}

std::string ShmEngine::where_is(int peer) const {
  const shm::RankControl& control = group_.segment.control(peer);
  const shm::CallSlot* last = last_call(peer);
  const uint32_t number = last ? last->number.load(std::memory_order_acquire) : 0;
  Fingerprint::Words outer;
  const std::string thrown = control.exception.since(group_.inner ? control.outer.read(outer) : number);
  const std::string call =
      number == 0 ? std::string() : concat(describe(membership(), Fingerprint::of(last->call)), " #", number);
  return where_and_thrown(call, thrown);
}

void ShmEngine::note_exception(const std::string& what) { group_.own().exception.set(last_number(), what); }

void ShmEngine::drop_what_is_owed() {
  messages_.drop_what_nobody_takes([&](int peer) { return is_gone(peer); });
}

// ---- leaving

void ShmEngine::say_goodbye() {
  said_goodbye_ = true;
  group_.segment.publish(group_.own().state, shm::RankState::kLeft);
}

Leaver::Does ShmEngine::after_goodbye(int peer) {
  const auto state = group_.segment.control(peer).state.load();  // before the call: it may end just after it
  const bool has_gone = state == shm::RankState::kLeft || group_.is_dead(peer);
  const shm::CallSlot* last = last_call(peer);
  if (last && static_cast<int32_t>(last->number.load(std::memory_order_acquire) - last_number()) > 0)
    return Does::kCalled;
  if (state == shm::RankState::kThrew) return Does::kThrew;
  return has_gone ? Does::kLeft : Does::kStays;
}

// ---- failing

void ShmEngine::publish_failure(const std::string& text, int culprit) {
  group_.segment.record_failure({group_.rank, culprit, text});
}
void ShmEngine::record_failure(const Operation&, const std::string& reason, int culprit) {
  publish_failure(reason, culprit);
}

Failure ShmEngine::recorded_failure() const {
  const auto failure = group_.segment.recorded_failure();
  return {failure.reporter < 0 ? -1 : group_.global(failure.reporter), failure.culprit, failure.text};
}

void ShmEngine::give_up() {
  if (!broken()) fail_as_recorded(*Operation::make());
}

std::exception_ptr ShmEngine::error_for(const Operation& operation, const std::string& reason, int culprit) const {
  if (group_.inner) return std::make_exception_ptr(CommError(prefix_of(membership(), operation) + reason));
  return Engine::error_for(operation, reason, culprit);
}

void ShmEngine::let_go() {
  const Operation* call = call_.entered();
  if (!call && !messages_.is_exposed()) return;
  bool raised = false;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    // A running peer lowers its hands after a chunk. One in our own process runs, or we would not either.
    const Deadline patience = within(group_.same_process(peer) ? 10s : 20ms);
    while (group_.segment.control(peer).hands.load(std::memory_order_seq_cst) != 0 && !group_.is_dead(peer)) {
      if (patience.passed()) {
        raised = true;
        break;
      }
      sched_yield();
    }
  }
  if (raised && call && call_.own_slot().exposure == shm::Exposure::kWritable) group_.take_back(call->give[0]);
  call_.leave();
}

}  // namespace chorale::comm
