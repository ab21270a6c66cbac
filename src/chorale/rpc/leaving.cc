// How an agent ends, alone or with all others.
#include "chorale/base/log.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {

using namespace std::chrono_literals;

void Core::shut_down(bool graceful, Timeout timeout) {
  State running = State::kRuns;
  if (!state_.compare_exchange_strong(running, State::kLeaves)) {
    if (running == State::kStarts) {
      state_ = State::kStopped;
      if (crew_) crew_->stop();
    }
    return;
  }
  std::exception_ptr error;
  if (graceful) {
    try {
      if (membership_) {
        leave_alone(timeout);
      } else {
        leave_gracefully(timeout);
      }
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  // The agent counts as stopped from here on, whatever happened before.
  state_ = State::kStopped;
  forget_agent();
  if (membership_) membership_->leave();
  use_.reset();
  timer_.stop();
  // Functions that are served may wait for what does not come any more, and the crew waits for them.
  end_waits(error_of(RpcErrorKind::kNotRunning, own_, "[rpc] the agent was shut down"));
  crew_->stop();
  const std::string leaks = references_.leaks();
  if (error) std::rethrow_exception(error);
  if (leaks.empty() || !graceful) return;
  const std::string text = concat("[rpc] references of worker ", own_, " are still held at shutdown: ", leaks);
  if (options_.check_leaks) throw RpcError(RpcErrorKind::kReferenceLeak, own_, text);
  log_warning(text);
}

// Ends the waits of this worker's threads, since no answer and no value will come.
void Core::end_waits(const std::exception_ptr& error) {
  fail_all(-1, "[rpc] the agent was shut down");
  contexts_.fail_backwards(error);
  references_.fail_values(error);
  std::map<std::string, std::shared_ptr<Gathering>> gatherings;
  {
    const std::lock_guard lock(mutex_);
    gatherings.swap(gatherings_);
  }
  for (const auto& [key, gathering] : gatherings) fail_gathering(*gathering, error);
}

void Core::leave_gracefully(Timeout timeout) {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : roster_.all()) names.push_back(worker.name);
  barrier(names, timeout);
  if (options_.delete_references) references_.delete_all(within(100s));
  // Each call that is served is a call of somebody, so it is enough to count one's own. Workers count at different
  // times, and a chain of calls can pass from one that has not counted yet to one that has. So they count twice: if no
  // worker had a call at the first count, and none has begun one until the second, which all make after all have made
  // the first, then there was a moment without calls.
  Unfinished before{.calls = 1};
  for (bool ends = false; !ends;) {
    wait_until([this] { return unfinished().calls == 0; }, Deadline::never());
    const Unfinished own = unfinished();
    Writer writer;
    writer.number(own.calls);
    writer.number(own.begun);
    Unfinished all;
    for (const auto& [name, bytes] : all_gather(names, std::move(writer.payload), timeout)) {
      Reader reader(bytes, {});
      all.calls += reader.number<int64_t>();
      all.begun += reader.number<uint64_t>();
    }
    ends = before.calls == 0 && all.begun == before.begun;
    before = all;
  }
  // Others may wait for an answer of this worker that is late on purpose.
  wait_until([this] { return delayed_ == 0; }, Deadline::never());
}

// This worker leaves a group that goes on. Values that others still refer to are lost to them.
void Core::leave_alone(Timeout timeout) {
  const Deadline deadline = timeout.count() == 0 ? Deadline::never() : within(timeout);
  const auto wait_for_calls = [&] {
    if (!wait_until([this] { return own_calls() == 0; }, deadline))
      throw RpcError(RpcErrorKind::kTimeout, own_,
                     concat("[rpc] worker '", own_info_.name, "' leaves with ", own_calls(), " calls in flight after ",
                            std::chrono::duration<double>(timeout).count(), " s"));
  };
  wait_for_calls();
  if (options_.delete_references) references_.delete_users(within(100s));
  wait_for_calls();
  membership_->leave();
  std::vector<Future<void>> told;
  for (const WorkerInfo& worker : roster_.all()) {
    if (worker.id == own_) continue;
    told.emplace_back(std::make_shared<Future<void>::State>(helper()));
    request(worker.id, {.kind = MessageKind::kLeave}, {.internal = true},
            [done = told.back()](const Message&, const std::exception_ptr&) { done.state()->try_set({}); });
  }
  for (const Future<void>& one : told) one.state()->wait(deadline);
  wait_until([this] { return delayed_ == 0; }, deadline);
}

int64_t Core::own_calls() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pending_.size()) - gathers_;
}

Core::Unfinished Core::unfinished() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<int64_t>(pending_.size()) - gathers_ + answering_, calls_begun_};
}

}  // namespace chorale::rpc
