#include "chorale/comm/shm/shm_engine.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iostream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// Waiting, by the number of rounds without progress. With a core for each rank spinning is best, for a time that covers
// the differences between ranks; with fewer, the core is needed by the rank one waits for. After a long wait the core
// is worth more than the latency.
constexpr int64_t kSpins = 2000, kYields = 2000;
constexpr Deadline::Clock::duration kLookInterval = 5ms;  // how often the reason for a long wait is looked for
constexpr Deadline::Clock::duration kLongestSleep = 20ms;
constexpr Deadline::Clock::duration kFirstWord = 5s;  // after which one says for whom one waits

// Takes the line from the caches of others, who have read it, before it is written, without waiting for it.
void own_soon(const void* line) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line))); }

}  // namespace

ShmEngine::ShmEngine(std::shared_ptr<RankContext> whose_context, Membership whose, shm::GroupSegment segment,
                     const std::vector<ShmIdentity>& identities, bool inner)
    : Engine(std::move(whose_context), std::move(whose)),
      group_(context(), membership(), std::move(segment), identities, inner),
      messages_(group_),
      inner_(inner),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  group_.own().state.store(shm::RankState::kJoined);
  enlist();
}

ShmEngine::~ShmEngine() {
  const bool threw = std::uncaught_exceptions() > exceptions_at_birth_;
  {
    std::unique_lock lock(context().mutex);
    // Work that was started and dropped is still owed to the others.
    for (int64_t rounds = 0; !threw && !broken_ && !idle(); ++rounds) {
      progress();
      if (calls_.empty() && messages_.idle()) break;
      if (!calls_.empty()) {
        wait_a_little(lock, *calls_.front(), rounds, Deadline::never());
      } else {
        const auto rest = messages_.pending();
        if (rest) {
          wait_a_little(lock, *rest, rounds, Deadline::never());
          continue;
        }
        // An answer that found no room is still owed, unless its receiver is gone.
        messages_.drop_answers_to(gone_among(messages_.answered()));
        sched_yield();
      }
    }
    if (!idle())
      end_all(std::make_exception_ptr(StateError("[group] the group was destroyed before the work was done")));
    delist();
  }
  // Only a failure that others do not know yet is told as one.
  group_.segment.publish(group_.own().state, threw ? shm::RankState::kThrew : shm::RankState::kLeft);
}

void ShmEngine::submit(const Intrusive<Operation>& operation) {
  const bool message = operation->kind == CallKind::kSend || operation->kind == CallKind::kRecv;
  if (group_.segment.failed()) [[unlikely]] {
    if (!broken_) fail_as_recorded(*operation);
    std::rethrow_exception(broken_);
  }
  if (!message) operation->number = ++number_;
  operation->flight = flight_.enter(*operation);
  if (message) {
    messages_.submit(operation);
  } else {
    calls_.push_back(operation);
  }
  progress();
}

template <class F>
void ShmEngine::guarded(Operation& operation, const F& run) {
  try {
    run();
  } catch (const GroupFailed&) {
    fail_as_recorded(operation);
  } catch (const CallFailed& failure) {
    fail(operation, failure.reason, failure.culprit);
  } catch (const std::exception& error) {
    fail(operation, error.what(), membership().members[static_cast<size_t>(membership().rank)]);
  }
}

bool ShmEngine::has_message(Operation& receive) {
  bool found = false;
  guarded(receive, [&] { found = messages_.has_message(receive, done_); });
  finish_messages();
  return found;
}
bool ShmEngine::take_message(Operation& receive) {
  bool found = false;
  guarded(receive, [&] { found = messages_.take_message(receive, done_); });
  finish_messages();
  return found;
}

std::optional<std::string> ShmEngine::gone(int peer) const {
  if (gone_among({peer}).empty()) return std::nullopt;
  return how_it_went(peer);
}

void ShmEngine::give_up() {
  if (!broken_) fail_as_recorded(*Operation::make());
}

void ShmEngine::progress() {
  if (!calls_.empty()) step_calls();
  if (!messages_.idle()) [[unlikely]] {
    const Intrusive<Operation> any = messages_.pending();
    guarded(any ? *any : *Operation::make(), [&] { messages_.progress(done_); });
    finish_messages();
  }
}

void ShmEngine::finish_messages() {
  for (const auto& operation : done_) finish(*operation, nullptr);
  done_.clear();
}

void ShmEngine::step_calls() {
  while (!calls_.empty()) {
    Operation& operation = *calls_.front();
    bool done = false;
    guarded(operation, [&] {
      if (operation.phase == Operation::Phase::kQueued) enter_call(group_, operation, pieces_);
      done = step_call(group_, operation, pieces_);
    });
    if (!done || broken_) return;  // broken: the queue and its operations are gone
    own_soon(&group_.segment.slot(group_.rank, operation.number + 1));
    const Intrusive<Operation> finished = std::move(calls_.front());
    calls_.pop_front();
    finish(*finished, nullptr);
  }
}

void ShmEngine::finish(Operation& operation, const std::exception_ptr& error) {
  for (const memory::Block& block : operation.scratch) context().scratch().deallocate(block);
  operation.scratch.clear();
  flight_.leave(operation.flight, error != nullptr);
  complete(operation, error);
}

// ---- waiting

void ShmEngine::wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                              Deadline deadline) {
  if (rounds == 0) {
    next_look_ = {};
    word_interval_ = kFirstWord;
  }
  const int64_t spins = context().core_each ? kSpins : 1;
  if (rounds < spins) {
    _mm_pause();
    return;
  }
  if (rounds == spins) {
    next_look_ = Clock::now() + kLookInterval;
    next_word_ = operation.issued + word_interval_;
  }
  if (rounds < spins + kYields) {
    lock.unlock();  // another thread of this rank may want to start something
    sched_yield();
    lock.lock();
  } else {
    const auto sleep = std::min<Clock::duration>(kLongestSleep, deadline.earlier(operation.deadline).left());
    const auto others = context().engines.size() > 1 ? std::min<Clock::duration>(sleep, 1ms) : sleep;
    group_.segment.sleep(group_.rank, std::chrono::nanoseconds(others).count() + 1, [&] {
      progress();
      lock.unlock();
      return !operation.pending();
    });
    lock.lock();
  }
  if (!operation.pending()) return;
  // A deadline may be sooner than the next look at the peers.
  const auto now = Clock::now();
  const bool late = deadline.earlier(operation.deadline).end() <= now;
  if (!late && now < next_look_) return;
  next_look_ = now + kLookInterval;
  guarded(operation, [&] {
    look_around(operation, deadline);
    if (operation.pending() && now >= next_word_) say_who_is_awaited(operation, awaited(operation));
  });
}

void ShmEngine::look(Operation& operation) {
  guarded(operation, [&] { look_around(operation, Deadline::never()); });
}

std::vector<int> ShmEngine::awaited(const Operation& operation) const {
  if (operation.kind == CallKind::kSend) return {operation.peer};
  if (operation.kind == CallKind::kRecv) {
    if (operation.peer >= 0) return {operation.peer};
    std::vector<int> others;
    for (int peer = 0; peer < group_.size; ++peer) {
      if (peer != group_.rank) others.push_back(peer);
    }
    return others;
  }
  // A call that is not at the head waits for whoever the head waits for.
  return missing_ranks(group_, calls_.empty() ? operation : *calls_.front());
}

void ShmEngine::look_around(Operation& operation, Deadline deadline) {
  if (group_.segment.failed()) {
    // Others may have finished this very call and failed in a later one.
    progress();
    if (!operation.pending()) return;
    throw GroupFailed{};
  }
  const std::vector<int> missing = awaited(operation);
  const std::vector<int> gone = gone_among(missing);
  if (!gone.empty()) {
    // The flag may have been raised just before the end: it is read once more, after the notice of death.
    progress();
    if (!operation.pending()) return;
    for (int peer : awaited(operation)) {
      if (std::find(gone.begin(), gone.end(), peer) != gone.end())
        throw CallFailed{how_it_went(peer), group_.global(peer)};
    }
  }
  look_at_deadline(operation, deadline, with_the_stopped(missing, deadline.earlier(operation.deadline)));
}

// Whom we wait for may itself wait for a rank that is stopped: then that one is to blame.
std::vector<int> ShmEngine::with_the_stopped(std::vector<int> missing, Deadline deadline) const {
  for (int peer = 0; peer < group_.size && deadline.passed(); ++peer) {
    if (std::find(missing.begin(), missing.end(), peer) == missing.end() && group_.is_stopped(peer))
      missing.push_back(peer);
  }
  return missing;
}

std::vector<int> ShmEngine::gone_among(const std::vector<int>& ranks) const {
  std::vector<int> gone;
  for (int peer : ranks) {
    const auto state = group_.segment.control(peer).state.load();
    if (state == shm::RankState::kLeft || state == shm::RankState::kThrew || group_.is_dead(peer)) gone.push_back(peer);
  }
  return gone;
}

std::string ShmEngine::how_it_went(int peer) const {
  const auto state = group_.segment.control(peer).state.load();
  const char* how = state == shm::RankState::kThrew  ? " left the group because of an exception"
                    : state == shm::RankState::kLeft ? " has left the group"
                                                     : " has ended: killed, crashed or exited";
  return concat("rank ", group_.global(peer), " (", group_.condition(peer), ")", how, "; it ", where_is(peer));
}

void ShmEngine::look_at_deadline(Operation& operation, Deadline deadline, const std::vector<int>& missing) {
  if (!deadline.earlier(operation.deadline).passed()) return;
  if (operation.kind == CallKind::kMonitoredBarrier && group_.rank == 0 && !calls_.empty() &&
      calls_.front().get() == &operation) {
    return note_absence(membership(), operation);
  }
  const std::string time = in_seconds(Clock::now() - operation.issued);
  if (missing.empty()) throw CallFailed{concat("timed out after ", time), -1};
  // Of several, one that is stopped is to blame rather than one that waits as we do.
  const auto stopped = std::find_if(missing.begin(), missing.end(), [&](int peer) { return group_.is_stopped(peer); });
  const int culprit = stopped == missing.end() ? missing.front() : *stopped;
  throw CallFailed{concat("timed out: nothing from rank ", group_.global(culprit), " for ", time, "; rank ",
                          group_.global(culprit), " (", group_.condition(culprit), ") ", where_is(culprit)),
                   group_.global(culprit)};
}

void ShmEngine::say_who_is_awaited(const Operation& operation, const std::vector<int>& missing) {
  word_interval_ *= 2;
  next_word_ = operation.issued + word_interval_;
  if (missing.empty()) return;
  std::string who;
  for (int peer : missing) {
    if (!who.empty()) who += "; ";
    who += concat("rank ", group_.global(peer), " (", group_.condition(peer), ") ", where_is(peer));
  }
  // One write, so that lines of several ranks stay whole.
  std::cerr << concat(prefix_of(membership(), operation), "waiting since ", in_seconds(Clock::now() - operation.issued),
                      " for ", who, "\n")
            << std::flush;
}

std::string ShmEngine::where_is(int peer) const {
  const shm::RankControl& control = group_.segment.control(peer);
  const shm::CallSlot* last = nullptr;
  uint32_t number = 0;
  for (const shm::CallSlot& slot : control.slots) {
    const uint32_t found = slot.number.load(std::memory_order_acquire);
    if (!last || static_cast<int32_t>(found - number) > 0) {
      last = &slot;
      number = found;
    }
  }
  Fingerprint outer;
  const std::string thrown = control.exception.since(inner_ ? control.outer.read(outer) : number);
  return where_and_thrown(number == 0 ? std::string() : concat(describe(membership(), last->fingerprint), " #", number),
                          thrown);
}

void ShmEngine::note_exception(const std::string& what) { group_.own().exception.set(number_, what); }

// ---- failing

void ShmEngine::record_failure(const std::string& text, int culprit) {
  group_.segment.record_failure({group_.rank, culprit, text});
}

ShmEngine::Failure ShmEngine::recorded_failure() const {
  const auto failure = group_.segment.recorded_failure();
  return {failure.reporter < 0 ? -1 : group_.global(failure.reporter), failure.culprit, failure.text};
}

void ShmEngine::fail(const Operation& operation, const std::string& reason, int culprit) {
  record_failure(reason, culprit);
  take_memory_back();
  end_all(inner_ ? std::make_exception_ptr(CommError(prefix_of(membership(), operation) + reason))
                 : error_of(membership(), operation, reason, culprit, flight_));
}

void ShmEngine::fail_as_recorded(const Operation& operation) {
  const Failure failure = recorded_failure();
  const std::string who = failure.reporter < 0 ? std::string() : concat("rank ", failure.reporter, " says: ");
  fail(operation, reason_of_a_broken_group(membership(), operation, who + failure.text), failure.culprit);
}

void ShmEngine::end_all(const std::exception_ptr& error) {
  broken_ = error;
  for (const auto& operation : std::exchange(calls_, {})) finish(*operation, error);
  for (const auto& operation : messages_.abandon()) finish(*operation, error);
}

void ShmEngine::take_memory_back() {
  if (calls_.empty() && !messages_.is_exposed()) return;
  SmallVector<int, 8> raised;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    // A running peer lowers its hands after a chunk. One in our own process runs, or we would not either.
    const Deadline patience = within(group_.same_process(peer) ? 10s : 20ms);
    while (group_.segment.control(peer).hands.load(std::memory_order_seq_cst) != 0 && !group_.is_dead(peer)) {
      if (patience.passed()) {
        raised.push_back(peer);
        break;
      }
      sched_yield();
    }
  }
  if (raised.empty() || calls_.empty()) return;
  const Operation& call = *calls_.front();
  if (call.phase == Operation::Phase::kQueued) return;
  if (group_.segment.slot(group_.rank, call.number).exposure == shm::Exposure::kWritable)
    group_.take_back(call.give[0]);
}

}  // namespace chorale::comm
