#include "chorale/comm/net/net_engine.h"

#include <algorithm>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// For so long the worker leaves a new call to whoever submitted it: mostly that thread waits for it right away.
constexpr auto kFirstRefusal = 30us;
// The worker looks for calls this often, for so long after the last one.
constexpr auto kGlance = 200us;
constexpr auto kHalfAwake = 20ms;
// While a call runs elsewhere, the worker moves what else this rank has in flight.
constexpr auto kTick = 1ms;
constexpr int64_t kRoundsPerLook = 16;

}  // namespace

NetEngine::NetEngine(std::shared_ptr<RankContext> whose_context, Membership whose, NetLayout layout, uint64_t id,
                     std::shared_ptr<ShmEngine> local)
    : Engine(std::move(whose_context), std::move(whose)),
      group_(membership(), std::move(layout), context().net, id, std::move(local)),
      messages_(group_),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  enlist();
  worker_ = std::thread([this] { work(); });
}

NetEngine::~NetEngine() {
  const bool threw = std::uncaught_exceptions() > exceptions_at_birth_;
  {
    std::unique_lock lock(context().mutex);
    // Work that was started and dropped is still owed to the others.
    for (int64_t rounds = 0; !threw && !broken_ && !idle(); ++rounds) {
      progress();
      if (idle() || broken_) break;
      wait_a_little(lock, calls_.empty() ? *messages_.pending() : *calls_.front(), rounds, Deadline::never());
    }
    if (threw && running_)
      group_.fail(finished_ + 1,
                  concat("rank ", group_.global(group_.rank()), " left the group because of an exception"),
                  group_.global(group_.rank()));
    stopping_ = true;
    for_worker_.notify_all();
  }
  worker_.join();
  const std::lock_guard lock(context().mutex);
  const auto error = std::make_exception_ptr(StateError("[group] the group was destroyed before the work was done"));
  for (const auto& operation : std::exchange(calls_, {})) finish(*operation, error);
  for (const auto& operation : messages_.abandon()) finish(*operation, error);
  delist();
  group_.leave(finished_, threw);
}

void NetEngine::submit(const Intrusive<Operation>& operation) {
  const bool message = operation->kind == CallKind::kSend || operation->kind == CallKind::kRecv;
  if (group_.failed()) [[unlikely]] {
    if (!broken_) end_all(*operation);
    std::rethrow_exception(broken_);
  }
  if (!message) operation->number = ++number_;
  operation->flight = flight_.enter(*operation);
  if (message) {
    guarded(*operation, [&] { messages_.submit(operation); });
    progress();
  } else {
    calls_.push_back(operation);
    if (worker_sleeps_) for_worker_.notify_one();
  }
}

template <class F>
void NetEngine::guarded(const Operation& operation, const F& run) {
  try {
    run();
    return;
  } catch (const GroupFailed&) {
  } catch (const CallFailed& failure) {
    group_.fail(finished_ + 1, failure.reason, failure.culprit);
  } catch (const std::exception& error) {
    group_.fail(finished_ + 1, error.what(), group_.global(group_.rank()));
  }
  end_all(operation);
}

void NetEngine::progress() {
  if (messages_.idle()) return;
  const Intrusive<Operation> first = messages_.pending();
  guarded(*first, [&] {
    if (group_.fails(finished_ + 1)) throw GroupFailed{};
    messages_.progress(done_);
  });
  for (const auto& operation : done_) finish(*operation, nullptr);
  done_.clear();
}

void NetEngine::finish(Operation& operation, const std::exception_ptr& error) {
  flight_.leave(operation.flight, error != nullptr);
  complete(operation, error);
}

// ---- running calls

void NetEngine::work() {
  std::unique_lock lock(context().mutex);
  Deadline::Clock::time_point last{};  // when there was something to do
  while (!stopping_) {
    const auto now = Deadline::Clock::now();
    if (running_) {
      for_worker_.wait_for(lock, kTick);
      for (Engine* engine : context().engines) {
        if (!engine->idle()) engine->progress();
      }
      last = now;
    } else if (!calls_.empty()) {
      if (now - calls_.front()->issued < kFirstRefusal) {
        for_worker_.wait_for(lock, kFirstRefusal);
      } else {
        run(lock, Deadline::never());
      }
      last = now;
    } else if (now - last < kHalfAwake) {
      if (number_ != seen_by_worker_) last = now;
      seen_by_worker_ = number_;
      for_worker_.wait_for(lock, kGlance);
    } else {
      worker_sleeps_ = true;
      for_worker_.wait(lock);
      worker_sleeps_ = false;
    }
  }
}

void NetEngine::run(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  const Intrusive<Operation> operation = calls_.front();
  group_.enter(operation->number, operation->print);
  bool done = false;
  {
    NetCall call(group_, *operation, deadline.earlier(operation->deadline));
    running_ = &call;
    lock.unlock();
    done = run_unlocked(call);
    lock.lock();
    running_ = nullptr;
  }
  if (done) {
    calls_.pop_front();
    ++finished_;
    finish(*operation, nullptr);
  } else {
    end_all(*operation);
  }
  for_waiters_.notify_all();
}

bool NetEngine::run_unlocked(NetCall& call) {
  const uint32_t number = call.operation.number;
  try {
    run_call_between_hosts(call);
    return true;
  } catch (const GroupFailed&) {
  } catch (const CallFailed& failure) {
    std::optional<CallFailed> accused;
    if (failure.unsure) {
      const Deadline patience = within(kUnsurePatience);
      while (!group_.failed() && !patience.passed() && !(accused = group_.accusation())) {
        std::this_thread::sleep_for(1ms);
      }
    }
    const CallFailed& known = accused ? *accused : failure;
    if (!group_.failed()) group_.fail(number, known.reason, known.culprit);
  } catch (const std::exception& error) {
    group_.fail(number, error.what(), group_.global(group_.rank()));
  }
  return false;
}

void NetEngine::note_exception(const std::string& what) { group_.note_exception(what); }

void NetEngine::end_all(const Operation& operation) {
  group_.share_failure(finished_ + 1);
  {
    const std::lock_guard lock(group_.local->context().mutex);
    group_.local->give_up();
  }
  if (!broken_) {
    const NetGroup::Failure failure = group_.failure();
    std::string text = failure.text;
    if (failure.reporter != group_.global(group_.rank())) {
      if (failure.reporter >= 0) text = concat("rank ", failure.reporter, " says: ", text);
      text = reason_of_a_broken_group(membership(), operation, text);
    }
    broken_ = error_of(membership(), operation, text, failure.culprit, flight_);
  }
  // A call that runs in another thread ends itself, and is completed by it.
  std::deque<Intrusive<Operation>> calls;
  if (running_) {
    calls.push_back(calls_.front());
    calls_.pop_front();
  }
  calls_.swap(calls);
  for (const auto& call : calls) finish(*call, broken_);
  for (const auto& message : messages_.abandon()) finish(*message, broken_);
}

// ---- waiting

void NetEngine::wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                              Deadline deadline) {
  const bool message = operation.kind == CallKind::kSend || operation.kind == CallKind::kRecv;
  if (!message) {
    if (running_) {
      running_->shorten(deadline);
      for_waiters_.wait_for(lock, kTick);
    } else {
      run(lock, deadline);
    }
    return;
  }
  const uint32_t seen = group_.fabric().events();
  progress();
  if (!operation.pending()) return;
  if (rounds % kRoundsPerLook == 0) {
    guarded(operation, [&] { messages_.look(operation, deadline); });
    if (!operation.pending()) return;
  }
  lock.unlock();
  messages_.wait_for_event(operation, rounds, seen);
  lock.lock();
}

// Calls are run by a thread, which looks itself.
void NetEngine::look(Operation& operation) {
  if (operation.kind != CallKind::kSend && operation.kind != CallKind::kRecv) return;
  guarded(operation, [&] { messages_.look(operation, Deadline::never()); });
}

}  // namespace chorale::comm
