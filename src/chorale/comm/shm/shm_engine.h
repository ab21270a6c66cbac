// Inside comm: the engine of groups whose ranks, threads or processes, are all on one host.
#pragma once

#include "chorale/comm/engine.h"
#include "chorale/comm/leaving.h"
#include "chorale/comm/shm/shm_call.h"
#include "chorale/comm/shm/shm_messages.h"

namespace chorale::comm {

class ShmEngine final : public Engine, public Leaver {
 public:
  // `inner`: moves the data of one host for an engine of several hosts, which reports failures itself and finds out
  // which rank made a different call.
  ShmEngine(std::shared_ptr<RankContext> context, Membership membership, shm::GroupSegment segment,
            const std::vector<ShmIdentity>& identities, bool inner = false);
  // Finishes what is in flight, unless an exception is passing through: then the others are told.
  ~ShmEngine() override;

  const char* backend() const override { return "shm"; }
  bool shares_process() const override { return shares_process_; }
  bool shares_host() const override { return true; }
  void note_exception(const std::string& what) override;
  bool is_broken() const override { return group_.segment.failed(); }
  const ShmGroup& group() const { return group_; }

  // An engine of several hosts calls these, with the context's lock.
  // Whether a message for this receive, which was not submitted, is there; and takes it.
  bool has_message(Operation& receive);
  bool take_message(const base::Intrusive<Operation>& receive);
  // Why nothing comes from this rank any more, if that is so.
  std::optional<CallFailed> gone(int peer) const override;
  bool is_stopped(int peer) const override { return group_.is_stopped(peer); }
  // Ends everything with the failure that was recorded: nobody writes into memory of callers any more.
  void give_up();

  void finish_calls(std::unique_lock<std::mutex>& lock) override { drain(lock); }
  void say_goodbye() override;
  Does after_goodbye(int peer) override;
  std::string describe_peer(int peer) const override { return who_is(peer); }

  // Publishes a failure, if it is the first, without ending anything here. May be called by any thread, without a lock.
  void publish_failure(const std::string& text, int culprit);
  // The first failure. Waits a moment for one that is being written.
  Failure recorded_failure() const override;

 private:
  bool step(const base::Intrusive<Operation>& operation, bool is_new) override;
  MessageQueue& messages() override { return messages_; }
  void sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) override;
  std::vector<int> awaited_by_call(const Operation& first) const override;
  std::optional<int> find_culprit(const Operation& operation, const std::vector<int>& missing) override;
  std::string who_is(int peer) const override;
  void record_failure(const Operation& operation, const std::string& reason, int culprit) override;
  // Takes memory back from peers whose hands stay up (Note [Hands]).
  void let_go() override;
  std::exception_ptr error_for(const Operation& operation, const std::string& reason, int culprit) const override;
  void drop_what_is_owed() override;
  void leave_what_is_late() override { messages_.leave_parcels(); }

  bool is_gone(int peer) const;
  std::string where_is(int peer) const;
  // The last call that a peer has entered; null: none yet.
  const shm::CallSlot* last_call(int peer) const;

  ShmGroup group_;
  bool said_goodbye_ = false;
  ShmCall call_;
  ShmMessages messages_;
  const bool shares_process_;
  mutable std::vector<Clock::time_point> seen_alive_;  // by peer: when it was last seen alive; with the lock
};

}  // namespace chorale::comm
