#include "chorale/comm/engine.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/core_watch.h"
#include "chorale/comm/device_part.h"
#include "chorale/trace/trace.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// Waiting, by the number of rounds without progress. With a core for each rank spinning is best, for a time that covers
// the differences between ranks; with fewer, the core is needed by the rank one waits for. After a long wait the core
// is worth more than the latency.
constexpr int64_t kSpins = 2000, kYields = 2000;
// Where the core is wanted (Note [A core that others want]): some microseconds.
constexpr int64_t kSpinsOfBusy = 100;
constexpr int64_t kSpinsPerLook = 16;                     // at the clock
constexpr Deadline::Clock::duration kLookInterval = 5ms;  // how often the reason for a long wait is looked for
constexpr Deadline::Clock::duration kLongestSleep = 20ms;
constexpr int64_t kYieldsForDevice = 500;
constexpr const char* kDestroyed = "[group] the group was destroyed before the work was done";

// The wait that a thread is in, and what it knows of its core.
struct BusyWait {
  CoreWatch core;
  bool sleeps_soon = false;
  Deadline::Clock::time_point spun{};  // the last look at the clock between two rounds

  void begin() {
    sleeps_soon = core.is_wanted();
    spun = {};
  }
  // A round began, in which little was done since the last look.
  void look(Deadline::Clock::time_point now, bool core_each) {
    const auto before = std::exchange(spun, now);
    if (before == Deadline::Clock::time_point{} || now - before < CoreWatch::gap(core_each)) return;
    if (core.note_gap(now)) sleeps_soon = true;
  }
};
thread_local BusyWait busy_wait;

}  // namespace

Engine::Engine(std::shared_ptr<RankContext> context, Membership membership)
    : patience_{context->core_each ? kSpins : 1, kYields},
      context_(std::move(context)),
      membership_(std::move(membership)) {}

void Engine::enlist() {
  const std::lock_guard lock(context_->mutex);
  context_->engines.push_back(this);
}
void Engine::delist() { std::erase(context_->engines, this); }

// ---- moving

void Engine::submit(const base::Intrusive<Operation>& operation) {
  if (is_broken()) [[unlikely]]
    refuse(*operation);
  const bool message = operation->is_message();
  if (!message) operation->number = ++number_;
  operation->flight = flight_.enter(*operation);
  if (message) {
    if (operation->is_parcel && operation->kind == CallKind::kSend) {
      if (const auto reason = gone(operation->peer)) return fail_alone(*operation, *reason);
    }
    guarded(*operation, [&] { messages().submit(operation); });
    if (broken_ && operation->pending()) finish(*operation, broken_);
    note_messages();
  } else {
    calls_.push_back(operation);
  }
  progress();
}

void Engine::refuse(const Operation& operation) {
  if (!broken_) fail_as_recorded(operation);
  std::rethrow_exception(broken_);
}

void Engine::step_calls() {
  while (!calls_.empty()) {
    // Polls come here: no reference is taken, since a step ends no call.
    const Operation* const first = calls_.front().get();
    bool done = false;
    guarded(*calls_.front(), [&] {
      // All ranks have come, and devices move the bytes: finish_first() asks whether they have.
      done = is_on_device(*first) || step(calls_.front(), std::exchange(first_is_new_, false));
    });
    if (!done || broken_) return;  // broken: the queue and its operations are gone
    finish_first();
    if (!calls_.empty() && calls_.front().get() == first) return;
  }
}

void Engine::finish_first() {
  if (DevicePart* const part = device_part_of(*calls_.front())) [[unlikely]] {
    const base::Intrusive<Operation> operation = calls_.front();
    bool done = false;
    part->is_on = true;
    guarded(*operation, [&] { done = part->step(); });
    if (!done || broken_) return;
  }
  const base::Intrusive<Operation> finished = std::move(calls_.front());
  calls_.pop_front();
  first_is_new_ = true;
  finished_ = finished->number;
  finish(*finished, nullptr);
}

void Engine::step_messages() {
  const base::Intrusive<Operation> any = messages().pending();
  guarded(any ? *any : *Operation::make(), [&] { messages().progress(done_); });
  for (const auto& operation : done_) finish(*operation, nullptr);
  done_.clear();
  for (const auto& [parcel, failure] : messages().take_failed()) {
    if (parcel->pending()) fail_alone(*parcel, failure);
  }
  note_messages();
}

void Engine::finish(Operation& operation, const std::exception_ptr& error) {
  flight_.leave(operation.flight, error != nullptr);
  complete(operation, error);
}

void Engine::drain(std::unique_lock<std::mutex>& lock) {
  std::optional<Wait> wait;
  while (!is_thrown_away() && !broken_ && !idle()) {
    progress();
    if (idle() || broken_) break;
    const base::Intrusive<Operation> rest = calls_.empty() ? messages().pending() : calls_.front();
    if (!rest) {
      drop_what_is_owed();
      leave_what_is_late();
      sched_yield();
      continue;
    }
    // A parcel that is still awaited may never be sent: no rank owes one.
    if (rest->is_parcel && rest->kind == CallKind::kRecv && withdraw(*rest)) {
      finish(*rest, std::make_exception_ptr(StateError(kDestroyed)));
      continue;
    }
    if (!wait || &wait->operation != rest.get()) wait.emplace(*rest, Deadline::never());
    wait_a_little(lock, *wait);
  }
}

void Engine::end_the_rest() {
  if (!idle()) finish_all(std::make_exception_ptr(StateError(kDestroyed)));
}

// ---- waiting

void Engine::wait_a_little(std::unique_lock<std::mutex>& lock, Wait& wait) {
  const int64_t round = wait.rounds++;
  if (!calls_.empty() && !wait.operation.is_message() && is_on_device(*calls_.front())) [[unlikely]] {
    // No rank rings a bell when a device is done. A thread that slept at once would wake long after the end.
    lock.unlock();
    if (round < kYieldsForDevice) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(50us);
    }
    lock.lock();
    return look_if_due(wait);
  }
  if (round == 0) busy_wait.begin();
  const int64_t spins = busy_wait.sleeps_soon ? std::min(patience_.spins, kSpinsOfBusy) : patience_.spins;
  // A wait for a parcel may be long, and other threads want to send: no spinning with the lock.
  if (round < spins && !wait.operation.is_parcel) {
    if (round % kSpinsPerLook == 0) busy_wait.look(Clock::now(), context_->core_each);
    _mm_pause();
    return;
  }
  if (round < spins + patience_.yields && !busy_wait.sleeps_soon) {
    busy_wait.spun = Clock::now();
    lock.unlock();  // another thread of this rank may want to start something
    sched_yield();
    const auto back = Clock::now();  // without the time that another thread holds the lock
    lock.lock();
    busy_wait.look(back, context_->core_each);
  } else {
    const auto most = std::min<Clock::duration>(kLongestSleep, wait.end().left());
    // Another group's calls of this rank may need this thread, and ring another bell.
    const bool others = std::any_of(context_->engines.begin(), context_->engines.end(),
                                    [this](const Engine* engine) { return engine != this && !engine->idle(); });
    sleep(lock, wait.operation, others ? std::min<Clock::duration>(most, 1ms) : most);
  }
  look_if_due(wait);
}

void Engine::look_if_due(Wait& wait) {
  if (!wait.operation.pending()) return;
  const auto now = Clock::now();
  if (wait.next_look == Clock::time_point{}) wait.next_look = now + kLookInterval;
  // A deadline may be sooner than the next look at the peers.
  if (now < wait.next_look && now < wait.end().end()) return;
  wait.next_look = now + kLookInterval;
  Operation& operation = wait.operation;
  guarded(operation, [&] {
    look_around(operation, wait.end());
    // A rank that serves requests may well wait for long.
    if (!operation.pending() || (operation.is_parcel && operation.peer < 0) || !wait.word.is_due(operation)) return;
    std::vector<std::string> who;
    for (int peer : awaited(operation)) who.push_back(who_is(peer));
    wait.word.say(membership_, operation, who);
  });
}

void Engine::look(Operation& operation) {
  // It looks itself, but for devices.
  if (has_own_thread() && !operation.is_message() && (calls_.empty() || !is_on_device(*calls_.front()))) return;
  guarded(operation, [&] { look_around(operation, operation.deadline); });
}

std::vector<int> Engine::awaited(const Operation& operation) const {
  // A call that is not the first waits for the ranks that the first one waits for.
  if (!operation.is_message() && (calls_.empty() || !is_on_device(*calls_.front())))
    return awaited_by_call(calls_.empty() ? operation : *calls_.front());
  if (operation.is_message() && operation.peer >= 0) return {operation.peer};
  std::vector<int> others;
  for (int peer = 0; peer < membership_.size(); ++peer) {
    if (peer != membership_.rank) others.push_back(peer);
  }
  return others;
}

void Engine::look_around(Operation& operation, Deadline deadline) {
  if (!operation.is_parcel) return look_at_peers(operation, deadline);
  try {
    look_at_peers(operation, deadline);
  } catch (const CallFailed& failure) {
    // If it cannot be taken back any more, it is done.
    if (operation.pending() && withdraw(operation)) fail_alone(operation, failure);
  }
}

void Engine::look_at_peers(Operation& operation, Deadline deadline) {
  hear(operation);
  const auto first_on_device = [&]() -> const DevicePart* {
    const DevicePart* const part = operation.is_message() || calls_.empty() ? nullptr : device_part_of(*calls_.front());
    return part && part->is_on ? part : nullptr;
  };
  if (first_on_device()) [[unlikely]] {
    progress();
    const DevicePart* const part = first_on_device();
    if (!operation.pending() || !part) return;
    // All ranks have come. One that has failed or gone since may have done its part: what is on the way has a moment.
    if (part->has_begun()) {
      if (has_failed()) {
        if (!operation.patience) operation.patience = within(kUnsurePatience);
        if (operation.patience->passed()) throw GroupFailed{};
      }
      for (int peer : awaited(operation)) {
        auto reason = gone(peer);
        if (!reason) continue;
        reason->unsure = true;
        raise_when_sure(operation, *reason);
      }
    }
    if (!deadline.passed()) return;
    for (int peer : awaited(operation)) {
      if (is_stopped(peer)) raise_timeout(membership_, operation, peer, who_is(peer));
    }
    throw CallFailed{concat("timed out after ", in_seconds(Clock::now() - operation.issued),
                            part->has_begun() ? ": all ranks have come, but their devices have not ended the call"
                                              : ": what this rank's device was asked before has not ended"),
                     -1};
  }
  if (has_failed()) {
    // Others may have finished this very call and failed in a later one.
    progress();
    if (!operation.pending()) return;
    throw GroupFailed{};
  }
  const std::vector<int> missing = awaited(operation);
  const bool parcel_of_any = operation.is_parcel && operation.peer < 0;
  size_t known_gone = 0;
  for (int peer : missing) {
    const auto reason = gone(peer);
    if (!reason) continue;
    drop_what_is_owed();
    // What it did last may have come just before its end: it is looked for once more, after the notice of death.
    progress();
    if (!operation.pending()) return;
    const std::vector<int> still = awaited(operation);
    if (std::find(still.begin(), still.end(), peer) == still.end()) continue;
    if (operation.is_parcel) {
      if (parcel_of_any && !known_gone_[operation.tag].insert(peer).second && ++known_gone < missing.size()) continue;
      throw CallFailed(*reason);
    }
    raise_when_sure(operation, *reason);
  }
  // Any rank of a call may hold up the one that is awaited.
  if (!parcel_of_any) {
    stop_watch_.look(
        membership_, operation, operation.is_message() ? operation.peer : -1,
        [this](int peer) { return is_stopped(peer); }, [this](int peer) { return who_is(peer); });
  }
  if (!deadline.passed()) return;
  if (operation.is_parcel) {
    progress();
    if (!operation.pending()) return;
    throw CallFailed{
        concat(operation.kind == CallKind::kSend ? "could not be handed over within " : "nothing came for ",
               in_seconds(Clock::now() - operation.issued), operation.peer < 0 ? "" : "; ",
               operation.peer < 0 ? std::string() : who_is(operation.peer)),
        operation.peer < 0 ? -1 : membership_.global(operation.peer)};
  }
  const bool is_first = !calls_.empty() && calls_.front().get() == &operation;
  if (operation.kind == CallKind::kMonitoredBarrier && membership_.rank == 0 && is_first &&
      roll_call_.awaited() < membership_.size())
    return roll_call_.skip(membership_, operation);
  const auto culprit = find_culprit(operation, missing);
  if (culprit) raise_timeout(membership_, operation, *culprit, *culprit < 0 ? std::string() : who_is(*culprit));
}

bool Engine::withdraw(const Operation& parcel) {
  const bool removed = messages().remove(parcel);
  note_messages();
  return removed;
}

// ---- failing

void Engine::fail_alone(Operation& parcel, const CallFailed& failure) {
  finish(parcel, std::make_exception_ptr(CommError(prefix_of(membership_, parcel) + failure.reason,
                                                   {.rank = membership_.own_global(),
                                                    .peer = failure.culprit,
                                                    .collective = std::string(name_of(parcel.kind)),
                                                    .sequence_number = -1})));
}

void Engine::fail(const Operation& operation, const std::string& reason, int culprit) {
  record_failure(operation, reason, culprit);
  let_go();
  finish_all(broken_ ? broken_ : error_for(operation, reason, culprit));
}

void Engine::abandon(const std::string& why) {
  if (broken_) return;
  record_failure(*Operation::make(), why, membership_.own_global());
  let_go();
  finish_all(std::make_exception_ptr(CommError(concat("[group] ", who_is_this(membership_), " ", why))));
}

void Engine::fail_as_recorded(const Operation& operation) {
  const Failure failure = recorded_failure();
  std::string text = failure.text;
  if (failure.reporter != membership_.own_global()) {
    if (failure.reporter >= 0) text = concat("rank ", failure.reporter, " says: ", text);
    text = reason_of_a_broken_group(membership_, operation, text);
  }
  let_go();
  finish_all(broken_ ? broken_ : error_for(operation, text, failure.culprit));
}

void Engine::finish_all(const std::exception_ptr& error) {
  broken_ = error;
  for (const auto& call : calls_) {
    if (DevicePart* const part = device_part_of(*call)) part->abandon();
  }
  std::deque<base::Intrusive<Operation>> calls;
  if (first_runs_alone_) {
    calls.push_back(calls_.front());
    calls_.pop_front();
  }
  calls_.swap(calls);
  for (const auto& call : calls) finish(*call, broken_);
  for (const auto& message : messages().abandon()) finish(*message, broken_);
  has_messages_ = false;
}

// ---- ending

void Engine::note(Operation& operation) const {
  const auto dtype = static_cast<DType>(operation.print.dtype);
  const auto elems = [&](const auto& chunks) {
    std::vector<int64_t> counts;
    for (const Chunk& chunk : chunks) counts.push_back(static_cast<int64_t>(chunk.bytes / size_of(dtype)));
    return counts;
  };
  const bool any = operation.kind == CallKind::kRecv && operation.peer < 0;
  const std::string name(any ? "recvAnySource" : name_of(kind_of(operation.print)));
  operation.completed = trace::Clock::now();
  trace::record({.name = concat(backend(), ":", name),
                 .rank = membership_.own_global(),
                 .start = operation.issued,
                 .end = operation.completed,
                 .async = true,
                 .shapes = std::move(operation.shapes),
                 .kind = trace::Kind::kCall,
                 .traffic = trace::Traffic{.call = name,
                                           .dtype = concat(dtype),
                                           .group = membership_.name,
                                           .ranks = membership_.members,
                                           .in_elems = elems(given(operation)),
                                           .out_elems = elems(taken(operation))}});
}

void Engine::complete(Operation& operation, std::exception_ptr error) const {
  if (!error) {
    try {
      for (const auto& action : operation.finish) action();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (operation.traced) [[unlikely]]
    note(operation);
  operation.finish.clear();
  operation.error = error;
  operation.state.store(error ? Operation::State::kFailed : Operation::State::kDone, std::memory_order_release);
}

namespace {

// Callbacks run once, in order, without the lock: they may start calls of their own.
void tell(std::unique_lock<std::mutex>& lock, Operation& operation) {
  while (!operation.then.empty()) {
    const auto callbacks = std::exchange(operation.then, {});
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
  operation.told = true;
}

void progress_others(Engine& engine) {
  for (Engine* other : engine.context().engines) {
    if (other != &engine && !other->idle()) other->progress();
  }
}

// Polls come often; late ranks are looked for seldom.
bool look_is_due(Operation& operation) {
  constexpr std::chrono::milliseconds kInterval{5};
  const auto now = Deadline::Clock::now();
  if (now < std::max(operation.looked, operation.issued) + kInterval) return false;
  operation.looked = now;
  return true;
}

}  // namespace

void wait(Engine& engine, Operation& operation, Deadline deadline) {
  const bool traced = operation.traced;
  const auto start = traced ? trace::Clock::now() : trace::Clock::time_point{};
  std::unique_lock lock(engine.context().mutex);
  if (operation.pending()) {
    Wait wait(operation, deadline);
    do {
      engine.progress();
      if (!operation.pending()) break;
      if (wait.rounds % 64 == 63) progress_others(engine);
      engine.wait_a_little(lock, wait);
    } while (operation.pending());
  }
  if (traced) [[unlikely]] {
    const Membership& who = engine.membership();
    trace::record({.name = concat(engine.backend(), ":wait"),
                   .rank = who.own_global(),
                   .start = start,
                   .end = trace::Clock::now(),
                   .kind = trace::Kind::kComm,
                   .traffic = trace::Traffic{.call = "wait", .dtype = concat(operation.dtype), .group = who.name}});
  }
  if (!operation.told) tell(lock, operation);
  if (operation.error) std::rethrow_exception(operation.error);
}

bool poll(Engine& engine, Operation& operation) {
  std::unique_lock lock(engine.context().mutex);
  if (operation.pending()) {
    engine.progress();
    progress_others(engine);
    if (operation.pending() && look_is_due(operation)) engine.look(operation);
  }
  if (operation.pending()) return false;
  if (!operation.told) tell(lock, operation);
  return true;
}

}  // namespace chorale::comm
