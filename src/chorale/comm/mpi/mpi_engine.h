// Inside comm: the engine of groups over MPI's own collectives and messages, for sites that tune MPI. Chosen with
// CHORALE_FABRIC=mpi in a job that mpirun (or srun with PMIx) has started.
//
// What holds beside the promises of comm/group.h: all ranks get equal bits, but in MPI's order of sums, not in that of
// Note [Order of sums]. A rank that is killed takes the job with it, by mpirun; one that leaves, throws or fails tells
// the others. A rank that was stopped ends the wait of others at their deadline; what it may still write then is said
// in Note [Calls over MPI].
#pragma once

#include <list>
#include <optional>

#include "chorale/comm/engine.h"
#include "chorale/comm/leaving.h"
#include "chorale/comm/mpi/mpi_call.h"
#include "chorale/comm/mpi/mpi_messages.h"
#include "chorale/comm/notice.h"

namespace chorale::comm {

class MpiEngine final : public Engine, public Leaver {
 public:
  // Makes the engine of all ranks of the job, which come together here.
  static std::shared_ptr<MpiEngine> connect(const std::string& name, int rank, int size, Deadline deadline);
  ~MpiEngine() override;

  const char* backend() const override { return "mpi"; }
  // What MPI has started cannot be taken back.
  bool has_parcels() const override { return false; }
  std::shared_ptr<Engine> make_subgroup(const Membership& membership) override;
  void note_exception(const std::string& what) override;
  bool is_broken() const override { return has_failure_.load(std::memory_order_acquire); }

  void finish_calls(std::unique_lock<std::mutex>& lock) override { drain(lock); }
  void say_goodbye() override;
  Does after_goodbye(int peer) override;
  std::string describe_peer(int peer) const override { return who_is(peer); }

  // Data moves in pieces of this many bytes; less than MPI's limit for tests only.
  void set_piece_bytes(size_t bytes) { piece_bytes_ = bytes; }

  MpiEngine(std::shared_ptr<RankContext> context, const Membership& membership, transport::Mpi& mpi,
            transport::Mpi::Comm comm);

 private:
  struct Peer {
    Notice::Kind state = Notice::Kind::kEntered;
    uint32_t number = 0;  // of the last call that it is known to have entered
    Fingerprint print;
    // Whether it has answered since this rank asked.
    bool answered = false;
    int awaits = -1;     // the rank that it waits for, if that is a single one
    std::string thrown;  // after call `thrown_after`
    uint32_t thrown_after = 0;
  };

  bool step(const base::Intrusive<Operation>& operation, bool is_new) override;
  MessageQueue& messages() override { return messages_; }
  void sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) override;
  // Notices, without waiting; tells the others which call this rank waits in.
  void hear(const Operation& operation) override;
  std::vector<int> awaited_by_call(const Operation& first) const override;
  std::optional<CallFailed> gone(int peer) const override;
  std::optional<int> find_culprit(const Operation& operation, const std::vector<int>& missing) override;
  std::string who_is(int peer) const override;
  void record_failure(const Operation& operation, const std::string& reason, int culprit) override;
  Failure recorded_failure() const override { return failure_; }
  void let_go() override { call_.abandon(); }

  // Numbers are those of calls that the sender has entered (kEntered), or completed.
  void tell(Notice::Kind kind, const Fingerprint& print = {}, int whom = -1, const std::string& text = {});
  void send_on();
  // True when another rank asks which one this rank waits for.
  bool read_notices();
  void compare_with_heard(const Operation& operation);
  int who_holds_up(const std::vector<int>& missing) const;
  std::string where_is(int peer) const;

  const MpiGroup group_;
  MpiCall call_;
  MpiMessages messages_;
  Fingerprint completed_print_;  // of the last call that is done
  size_t piece_bytes_ = transport::Mpi::kMostBytes;

  std::vector<Peer> peers_;
  std::list<std::pair<std::string, std::vector<transport::Mpi::Request>>> outgoing_;
  bool said_goodbye_ = false;
  Failure failure_;  // the first
  std::atomic<bool> has_failure_{false};
  uint32_t told_ = 0;                       // the last call of which the others were told that it was entered
  std::optional<Clock::time_point> asked_;  // when this rank asked the others which rank they await

  // The call that others made differently, and since when that is known.
  uint32_t differs_in_ = 0;
  Clock::time_point differs_since_;
};

}  // namespace chorale::comm
