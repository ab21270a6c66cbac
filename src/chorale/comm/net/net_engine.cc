#include "chorale/comm/net/net_engine.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/device_part.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// The worker leaves a new call to the thread that submitted it for so long: mostly that thread waits for it right away.
constexpr auto kFirstRefusal = 30us;
// The worker looks for calls this often, for so long after the last one.
constexpr auto kGlance = 200us;
constexpr auto kHalfAwake = 20ms;
// While a call runs elsewhere, the worker moves what else this rank has in flight.
constexpr auto kTick = 1ms;
constexpr int64_t kYields = 200;  // of a wait for a message of a neighbour
constexpr auto kGoodbyeInterval = 50ms;
constexpr auto kLongestSleep = 2ms;  // what happens on this host rings no bell of the fabric

}  // namespace

NetEngine::NetEngine(std::shared_ptr<RankContext> whose_context, Membership whose, NetLayout layout, uint64_t id,
                     std::shared_ptr<ShmEngine> local, bool shares_process)
    : Engine(std::move(whose_context), std::move(whose)),
      group_(membership(), context().algorithms, std::move(layout), context().net, id, std::move(local)),
      messages_(group_),
      shares_process_(shares_process) {
  patience_ = {0, kYields};
  enlist();
  worker_ = std::thread([this] { work(); });
}

NetEngine::~NetEngine() {
  const bool threw = is_thrown_away();
  {
    std::unique_lock lock(context().mutex);
    drain(lock);
    if (threw && running_) group_.fail(finished() + 1, group_.why_it_leaves(finished()), group_.global(group_.rank()));
    stopping_ = true;
    for_worker_.notify_all();
  }
  worker_.join();
  const std::lock_guard lock(context().mutex);
  end_the_rest();
  delist();
  group_.leave(finished(), threw);
}

bool NetEngine::step(const base::Intrusive<Operation>&, bool) {
  if (worker_sleeps_) for_worker_.notify_one();
  return false;
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
    } else if (first_call() && is_on_device(**first_call())) {
      progress();
      for_worker_.wait_for(lock, kGlance);
      last = now;
    } else if (first_call()) {
      if (now - (*first_call())->issued < kFirstRefusal) {
        for_worker_.wait_for(lock, kFirstRefusal);
      } else {
        run(lock, Deadline::never());
      }
      last = now;
    } else if (now - last < kHalfAwake) {
      if (last_number() != seen_by_worker_) last = now;
      seen_by_worker_ = last_number();
      for_worker_.wait_for(lock, kGlance);
    } else {
      worker_sleeps_ = true;
      for_worker_.wait(lock);
      worker_sleeps_ = false;
    }
  }
}

void NetEngine::run(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  const base::Intrusive<Operation> operation = *first_call();
  group_.enter(operation->number, operation->print);
  bool done = false;
  {
    NetCall call(group_, *operation, deadline.earlier(operation->deadline));
    running_ = &call;
    first_runs_alone_ = true;
    lock.unlock();
    done = run_unlocked(call);
    lock.lock();
    first_runs_alone_ = false;
    running_ = nullptr;
  }
  if (done) {
    finish_first();
    group_.note_finished(finished());
  } else {
    fail_as_recorded(*operation);
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
      while (!group_.failed() && !patience.passed() && !(accused = group_.accusation()) &&
             !(accused = group_.lost_one())) {
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

void NetEngine::record_failure(const Operation&, const std::string& reason, int culprit) {
  group_.fail(finished() + 1, reason, culprit);
}

void NetEngine::let_go() {
  group_.share_failure(finished() + 1);
  const std::lock_guard lock(group_.local->context().mutex);
  group_.local->give_up();
}

// ---- leaving

Leaver::Does NetEngine::after_goodbye(int peer) {
  const NetGroup::Stay stay = group_.stay_of(peer);  // before the call: it may end just after it
  if (static_cast<int32_t>(group_.whereabouts(peer).number - last_number()) > 0) return Does::kCalled;
  if (stay == NetGroup::Stay::kThrew) return Does::kThrew;
  if (stay == NetGroup::Stay::kLeft) return Does::kLeft;
  if (const auto now = Clock::now(); now >= next_question_) {
    next_question_ = now + kGoodbyeInterval;
    group_.ask_where();
  }
  return Does::kStays;
}

// ---- waiting

void NetEngine::wait_a_little(std::unique_lock<std::mutex>& lock, Wait& wait) {
  const Operation& operation = wait.operation;
  if (operation.is_message()) {
    const bool through_fabric_alone = operation.peer >= 0 && !group_.layout.is_here(operation.peer);
    if (!through_fabric_alone) return Engine::wait_a_little(lock, wait);
    sleep(lock, operation, std::min<Clock::duration>(kLongestSleep, wait.end().left()));
    look_if_due(wait);
  } else if (first_call() && is_on_device(**first_call())) {
    Engine::wait_a_little(lock, wait);
  } else if (running_) {
    running_->shorten(wait.deadline);
    for_waiters_.wait_for(lock, kTick);
  } else {
    run(lock, wait.deadline);
  }
}

void NetEngine::sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) {
  const uint32_t seen = group_.fabric().events();
  progress();
  if (!operation.pending()) return;
  lock.unlock();
  group_.fabric().await_event(seen, within(std::min<Clock::duration>(kLongestSleep, at_most)));
  lock.lock();
}

std::optional<int> NetEngine::find_culprit(const Operation& operation, const std::vector<int>& missing) {
  return messages_.inquiry(operation).find_culprit(missing);
}

}  // namespace chorale::comm
