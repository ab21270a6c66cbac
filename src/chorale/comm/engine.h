// Inside comm: what moves the data of a group. One per group and rank; the group's promises (order, deadlines, errors)
// are kept here, once for all. An engine (shm/, net/, mpi/) says how bytes move, whether it has a thread of its own,
// and what it knows of its peers.
//
// Note [Life of a call]
// submit() numbers a call, writes it to the flight recorder and puts it at the end of the queue; only the first one of
// the queue runs. progress() moves it by step(), which the engine provides, and so do waits. A waiting thread spins,
// yields and sleeps (wait_a_little()), and now and then looks why nothing happens (look_around()): the group has
// failed, an awaited rank is gone, or the time is over and a culprit must be named. Each of these is
// thrown, as GroupFailed or CallFailed, and ends all that the group has in flight (guarded()). Messages between two
// ranks are in a queue of their own (message_queue.h) and are awaited in the same way.
//
// An engine for devices fits in here, too: step() starts a call on a stream, and later asks whether its event has
// happened; the streams wait, and the host watches with the same looks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "chorale/comm/failure.h"
#include "chorale/comm/flight.h"
#include "chorale/comm/membership.h"
#include "chorale/comm/message_queue.h"
#include "chorale/comm/operation.h"
#include "chorale/comm/rank_context.h"
#include "chorale/comm/roll_call.h"
#include "chorale/comm/stop_watch.h"

namespace chorale::comm {

// One wait for one operation.
struct Wait {
  Wait(Operation& what, Deadline until) : operation(what), deadline(until) {}

  Operation& operation;
  const Deadline deadline;
  int64_t rounds = 0;  // without progress
  Deadline::Clock::time_point next_look{};
  WaitingWord word;

  // The deadline of the wait or of the operation, whichever is sooner.
  Deadline end() const { return deadline.earlier(operation.deadline); }
};

class Engine {
 public:
  Engine(std::shared_ptr<RankContext> context, Membership membership);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Membership& membership() const { return membership_; }
  RankContext& context() const { return *context_; }
  const std::shared_ptr<RankContext>& shared_context() const { return context_; }
  virtual const char* backend() const = 0;
  // True when calls move on while all threads of the caller do something else.
  virtual bool has_own_thread() const { return false; }
  // Whether other ranks of the group are threads of this process.
  virtual bool shares_process() const { return false; }
  // Whether all ranks are known to be on one host.
  virtual bool shares_host() const { return false; }
  // An engine of the same kind for some of the members, all of which call this. Null: their group is made from nothing.
  virtual std::shared_ptr<Engine> make_subgroup(const Membership&) { return nullptr; }
  // Whether it carries parcels (Note [Parcels] in message_queue.h).
  virtual bool has_parcels() const { return true; }
  // Called without the lock.
  virtual bool is_broken() const = 0;

  // The rest is called with the context's mutex locked.

  // Numbers the call, starts it if nothing is before it, and returns. Throws CommError when the group is broken.
  void submit(const base::Intrusive<Operation>& operation);
  // Moves everything as far as it goes without waiting.
  void progress() {
    if (!calls_.empty()) step_calls();
    if (has_messages_) [[unlikely]]
      step_messages();
  }
  bool idle() const { return calls_.empty() && !has_messages_; }
  // The operation did not move in the last call of progress(). Waits a little in a way that fits, and looks for the
  // reason: fails the group when a peer is gone or the deadline has passed. May unlock and lock again.
  virtual void wait_a_little(std::unique_lock<std::mutex>& lock, Wait& wait);
  // The same look without a wait, for an operation that is only polled.
  void look(Operation& operation);
  // The ranks that an operation waits for.
  std::vector<int> awaited(const Operation& operation) const;
  // Gives up a parcel that was submitted. False when it has ended already.
  bool withdraw(const Operation& parcel);
  // Fails because of this rank, unless it has failed already. Nothing is said of the last calls.
  void abandon(const std::string& why);
  // Peers that ask where this rank is (and it is still there, or gone without another call) are told of this text too.
  virtual void note_exception(const std::string& what) = 0;
  // The last calls of this rank as JSON text (docs: flight recorder).
  std::string flight_record() const { return flight_.json(membership_, {}); }
  uint32_t last_number() const { return number_; }

 protected:
  using Clock = Deadline::Clock;

  // ---- what an engine provides

  // Moves the first call as far as it goes without waiting; true when it is done. `is_new`: it was not moved before.
  // May throw GroupFailed and CallFailed. An engine whose calls are run by a thread does nothing here.
  virtual bool step(const base::Intrusive<Operation>& operation, bool is_new) = 0;
  virtual MessageQueue& messages() = 0;
  // Sleeps until something may have happened, for at most this long, without the lock. It may call progress() first.
  virtual void sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) = 0;
  // How many rounds a wait spins, and then yields, before it sleeps.
  struct Patience {
    int64_t spins, yields;
  };
  Patience patience_;

  // Listens for what peers tell out of turn, in a wait for this operation.
  virtual void hear(const Operation&) {}
  // The group has failed, and the first call and all messages with it.
  virtual bool has_failed() const { return is_broken(); }
  // The ranks that the first call waits for.
  virtual std::vector<int> awaited_by_call(const Operation& first) const = 0;
  // Why nothing comes from this rank any more, if that is so.
  virtual std::optional<CallFailed> gone(int peer) const = 0;
  // Whether this rank is known to be stopped (Note [Patience with stopped ranks]).
  virtual bool is_stopped(int) const { return false; }
  // The time is over: the rank to blame (-1: none is known). Nothing while that is being found out.
  virtual std::optional<int> find_culprit(const Operation& operation, const std::vector<int>& missing) = 0;
  // "rank 3 (process 4711, running) last entered all_reduce of 1000 f32 (sum) #12"
  virtual std::string who_is(int peer) const = 0;

  // Tells the others of a failure that this rank has found in an operation, unless there is one already.
  virtual void record_failure(const Operation& operation, const std::string& reason, int culprit) = 0;
  virtual Failure recorded_failure() const = 0;
  // The group has failed: from then on nobody writes into memory of callers, and ranks that wait for this one know.
  virtual void let_go() = 0;
  // What the caller gets.
  virtual std::exception_ptr error_for(const Operation& operation, const std::string& reason, int culprit) const {
    return error_of(membership_, operation, reason, culprit, flight_);
  }
  // Forgets words that are owed to peers that do not hear them any more.
  virtual void drop_what_is_owed() {}
  // When this rank leaves: does not wait for peers that have not taken their parcels in time.
  virtual void leave_what_is_late() {}

  // ---- what it can use

  // An engine is moved by waits in other groups of its rank from enlist(), when it is complete, to delist(), before its
  // parts go.
  void enlist();
  // Called by destructors, with the lock. Work that was started and dropped is still owed to the others: finishes it,
  // unless an exception is passing through. What is left then has failed.
  void drain(std::unique_lock<std::mutex>& lock);
  void end_the_rest();
  void delist();
  // True in a destructor that runs because of an exception.
  bool is_thrown_away() const { return std::uncaught_exceptions() > exceptions_at_birth_; }

  // What `run` throws becomes a failure of the group.
  template <class F>
  void guarded(Operation& operation, const F& run) {
    try {
      run();
    } catch (const GroupFailed&) {
      fail_as_recorded(operation);
    } catch (const CallFailed& failure) {
      fail(operation, failure.reason, failure.culprit);
    } catch (const std::exception& error) {
      fail(operation, error.what(), membership_.own_global());
    }
  }
  void fail(const Operation& operation, const std::string& reason, int culprit);
  void fail_as_recorded(const Operation& operation);
  // The first call is done.
  void finish_first();
  void look_if_due(Wait& wait);
  // An engine that has moved messages by other ways than progress() calls it.
  void note_messages() { has_messages_ = !messages().idle(); }

  const base::Intrusive<Operation>* first_call() const { return calls_.empty() ? nullptr : &calls_.front(); }
  bool broken() const { return broken_ != nullptr; }
  uint32_t finished() const { return finished_; }  // the number of the last call that is done

  RollCall roll_call_;             // of the first call, if it is a monitored barrier
  bool first_runs_alone_ = false;  // in a thread, which ends it itself

 private:
  StopWatch stop_watch_;

  void step_calls();
  void step_messages();
  void finish(Operation& operation, const std::exception_ptr& error);
  void finish_all(const std::exception_ptr& error);
  // Throws the reason why an operation does not move, if there is one; a parcel is ended with it.
  void look_around(Operation& operation, Deadline deadline);
  void look_at_peers(Operation& operation, Deadline deadline);
  // Ends a parcel that is not in the queue any more.
  void fail_alone(Operation& parcel, const CallFailed& failure);
  [[noreturn, gnu::cold]] void refuse(const Operation& operation);
  // Ends an operation; `error` is null when it succeeded. A waiting thread sees it at once, callbacks run later,
  // without the lock.
  void complete(Operation& operation, std::exception_ptr error) const;
  // Notes the operation for the trace.
  void note(Operation& operation) const;

  const std::shared_ptr<RankContext> context_;
  const Membership membership_;
  std::deque<base::Intrusive<Operation>> calls_;  // in order; only the first one runs
  bool first_is_new_ = true;
  bool has_messages_ = false;
  std::vector<base::Intrusive<Operation>> done_;  // reused
  FlightRecorder flight_;
  uint32_t number_ = 0, finished_ = 0;
  std::exception_ptr broken_;
  std::map<uint64_t, std::set<int>> known_gone_;  // by tag: whose end receives of parcels from anybody have reported
  const int exceptions_at_birth_ = std::uncaught_exceptions();
};

// Blocks until the operation is done; rethrows its error.
void wait(Engine& engine, Operation& operation, Deadline deadline);
bool poll(Engine& engine, Operation& operation);

}  // namespace chorale::comm
