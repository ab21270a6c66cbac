// Inside comm: the engine of groups whose ranks, threads or processes, are all on one host.
#pragma once

#include <deque>

#include "chorale/comm/flight.h"
#include "chorale/comm/messages.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class ShmEngine final : public Engine {
 public:
  // `inner`: moves the data of one host for an engine of several hosts, which reports failures itself and finds out
  // who made a different call.
  ShmEngine(std::shared_ptr<RankContext> context, Membership membership, shm::GroupSegment segment,
            const std::vector<ShmIdentity>& identities, bool inner = false);
  // Finishes what is in flight, unless an exception is passing through: then the others are told.
  ~ShmEngine() override;

  const char* backend() const override { return "shm"; }
  void submit(const Intrusive<Operation>& operation) override;
  void progress() override;
  bool idle() const override { return calls_.empty() && messages_.idle(); }
  void wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                     Deadline deadline) override;
  void note_exception(const std::string& what) override;
  void look(Operation& operation) override;
  std::string flight_record() const override { return flight_.json(membership(), {}); }
  uint32_t last_number() const override { return number_; }
  bool is_broken() const override { return group_.segment.failed(); }
  const ShmGroup& group() const { return group_; }

  // For an engine of several hosts, with the context's lock.
  // Whether a message for this receive, which was not submitted, is there; and takes it.
  bool has_message(Operation& receive);
  bool take_message(Operation& receive);
  // Why nothing comes from this rank any more, if that is so.
  std::optional<std::string> gone(int peer) const;
  // The ranks that an operation waits for.
  std::vector<int> awaited(const Operation& operation) const;
  // Ends everything with the failure that was recorded: nobody writes into memory of callers any more.
  void give_up();

  // Publishes a failure, if it is the first, without ending anything here. May be called by any thread, without a lock.
  void record_failure(const std::string& text, int culprit);
  struct Failure {
    int reporter = -1, culprit = -1;  // global ranks
    std::string text;
  };
  // The first failure. Waits a moment for one that is being written.
  Failure recorded_failure() const;

 private:
  using Clock = Deadline::Clock;

  void step_calls();
  void finish_messages();
  void finish(Operation& operation, const std::exception_ptr& error);
  // Looks why an operation does not move, and throws the reason if there is one.
  void look_around(Operation& operation, Deadline deadline);
  std::vector<int> gone_among(const std::vector<int>& ranks) const;
  std::string how_it_went(int peer) const;
  std::vector<int> with_the_stopped(std::vector<int> missing, Deadline deadline) const;
  void look_at_deadline(Operation& operation, Deadline deadline, const std::vector<int>& missing);
  void say_who_is_awaited(const Operation& operation, const std::vector<int>& missing);
  std::string where_is(int peer) const;
  // Breaks the group: publishes the failure unless there is one already, takes memory back, and ends all operations.
  void fail(const Operation& operation, const std::string& reason, int culprit);
  void fail_as_recorded(const Operation& operation);
  void end_all(const std::exception_ptr& error);
  void take_memory_back();

  // What an algorithm throws becomes a failure of the group.
  template <class F>
  void guarded(Operation& operation, const F& run);

  ShmGroup group_;
  Messages messages_;
  std::deque<Intrusive<Operation>> calls_;  // in order; only the first one runs
  std::vector<Intrusive<Operation>> done_;  // reused
  FlightRecorder flight_;
  uint32_t number_ = 0, pieces_ = 0;
  std::exception_ptr broken_;
  const bool inner_;
  int exceptions_at_birth_ = 0;

  // Of the wait in progress.
  Clock::time_point next_look_, next_word_;
  Clock::duration word_interval_{};
};

}  // namespace chorale::comm
