// Inside comm: the engine of groups over MPI's own collectives and messages, for sites that tune MPI. Chosen with
// CHORALE_FABRIC=mpi in a job that mpirun (or srun with PMIx) has started.
//
// What holds beside the promises of comm/group.h: all ranks get equal bits, but in MPI's order of sums, not in that of
// Note [Order of sums]. A rank that is killed takes the job with it, by mpirun; one that leaves, throws or fails tells
// the others. A rank that was stopped ends the wait of others at their deadline; what it may still write then is said
// in Note [Calls over MPI].
#pragma once

#include <deque>
#include <list>
#include <optional>

#include "chorale/comm/failure.h"
#include "chorale/comm/mpi/mpi_messages.h"

namespace chorale::comm {

class MpiEngine final : public Engine {
 public:
  // Of all ranks of the job, which come together here.
  static std::shared_ptr<MpiEngine> connect(const std::string& name, int rank, int size, Deadline deadline);
  ~MpiEngine() override;

  const char* backend() const override { return "mpi"; }
  std::shared_ptr<Engine> make_subgroup(const Membership& membership) override;
  void submit(const Intrusive<Operation>& operation) override;
  void progress() override;
  bool idle() const override { return calls_.empty() && messages_.idle(); }
  void wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                     Deadline deadline) override;
  void note_exception(const std::string& what) override;
  void look(Operation& operation) override;
  std::string flight_record() const override { return flight_.json(membership(), {}); }
  uint32_t last_number() const override { return number_; }
  bool is_broken() const override { return is_broken_.load(std::memory_order_acquire); }

  // Data moves in pieces of this many bytes; less than MPI's limit for tests only.
  void set_piece_bytes(size_t bytes) { piece_bytes_ = bytes; }

  MpiEngine(std::shared_ptr<RankContext> context, const Membership& membership, transport::Mpi& mpi,
            transport::Mpi::Comm comm);

 private:
  using Clock = Deadline::Clock;

  // What ranks tell each other out of turn.
  enum class News : uint32_t { kEntered, kLeft, kThrew, kFailed, kAsks, kAnswers, kException };
  struct Notice {
    News news = News::kEntered;
    uint32_t number = 0;      // of the call that the sender has entered, or of the last one that it has completed
    Fingerprint print;        // of that call
    int32_t whom = -1;        // a failure's culprit (global rank); in an answer, whom the sender waits for (group rank)
    uint32_t text_bytes = 0;  // that follow
  };
  struct Peer {
    News state = News::kEntered;
    uint32_t number = 0;  // of the last call that it is known to have entered
    Fingerprint print;
    // Since this rank has asked.
    bool answered = false;
    int awaits = -1;     // the one for whom it waits, if that is a single one
    std::string thrown;  // after call `thrown_after`
    uint32_t thrown_after = 0;
  };

  void tell(News news, const Fingerprint& print = {}, int whom = -1, const std::string& text = {});
  // Without waiting, in the wait for `operation`.
  void hear(const Operation& operation);
  void send_on();

  void finish(Operation& operation, const std::exception_ptr& error);
  void look_around(Operation& operation, Deadline deadline);
  void compare_with_heard(const Operation& operation);
  std::vector<int> awaited(const Operation& operation) const;
  void look_at_deadline(Operation& operation, Deadline deadline, const std::vector<int>& missing);
  int who_holds_up(const std::vector<int>& missing) const;
  void say_who_is_awaited(const Operation& operation, const std::vector<int>& missing);
  std::string where_is(int peer) const;
  void fail(const Operation& operation, const std::string& reason, int culprit);
  void fail_as_heard(const Operation& operation);
  void end_all(const std::exception_ptr& error);
  template <class F>
  void guarded(Operation& operation, const F& run);

  const MpiGroup group_;
  MpiCall call_;
  MpiMessages messages_;
  std::deque<Intrusive<Operation>> calls_;  // in order; only the first one runs
  std::vector<Intrusive<Operation>> done_;  // reused
  FlightRecorder flight_;
  uint32_t number_ = 0, completed_ = 0;
  Fingerprint completed_print_;
  size_t piece_bytes_ = transport::Mpi::kMostBytes;

  std::vector<Peer> peers_;
  std::list<std::pair<std::vector<std::byte>, std::vector<transport::Mpi::Request>>> outgoing_;
  std::optional<CallFailed> heard_;  // the first failure
  std::exception_ptr broken_;
  std::atomic<bool> is_broken_{false};
  uint32_t told_ = 0;  // the last call of which the others were told that it was entered
  int exceptions_at_birth_ = 0;
  std::optional<Clock::time_point> asked_;  // when this rank asked the others for whom they wait

  // Since when it is known that others made another call with the number `differs_in_`.
  uint32_t differs_in_ = 0;
  Clock::time_point differs_since_;

  // Of the wait in progress.
  Clock::time_point next_look_, next_word_;
  Clock::duration word_interval_{};
};

}  // namespace chorale::comm
