// Inside comm: the engine of groups whose ranks are on several hosts.
//
// Note [Which thread runs a call]
// Calls run in order, one at a time, each as plain blocking code without the lock (net_call.h): by the thread that
// waits for it when nothing else runs, which saves a hand-over, else by a worker thread of the group, so that
// communication overlaps what the caller does meanwhile. Waking that thread costs more than a small call; so after a
// call it stays half awake for a while, looks for new ones by itself, and submitting a call does not wake it. Messages
// between two ranks need no thread: the fabric has one.
#pragma once

#include <condition_variable>
#include <thread>

#include "chorale/comm/engine.h"
#include "chorale/comm/net/net_call.h"
#include "chorale/comm/net/net_messages.h"

namespace chorale::comm {

class NetEngine final : public Engine, public Leaver {
 public:
  // `local` is the engine of the members on this host, `id` the same on all members.
  NetEngine(std::shared_ptr<RankContext> context, Membership membership, NetLayout layout, uint64_t id,
            std::shared_ptr<ShmEngine> local, bool shares_process);
  // Finishes what is in flight, unless an exception is passing through: then the others are told.
  ~NetEngine() override;

  const char* backend() const override { return group_.fabric().name(); }
  bool has_own_thread() const override { return true; }
  bool shares_process() const override { return shares_process_; }
  void wait_a_little(std::unique_lock<std::mutex>& lock, Wait& wait) override;
  void note_exception(const std::string& what) override { group_.note_exception(what); }
  bool is_broken() const override { return group_.failed(); }
  const NetGroup& group() const { return group_; }
  void finish_calls(std::unique_lock<std::mutex>& lock) override { drain(lock); }
  void say_goodbye() override { group_.say_goodbye(finished()); }
  Does after_goodbye(int peer) override;
  std::string describe_peer(int peer) const override { return who_is(peer); }

 private:
  // Wakes the thread that runs calls.
  bool step(const base::Intrusive<Operation>& operation, bool is_new) override;
  MessageQueue& messages() override { return messages_; }
  void sleep(std::unique_lock<std::mutex>& lock, const Operation& operation, Clock::duration at_most) override;
  bool has_failed() const override { return group_.fails(); }
  std::vector<int> awaited_by_call(const Operation&) const override { return {}; }  // that is NetCall's business
  std::optional<CallFailed> gone(int peer) const override { return group_.gone(peer, 0); }
  bool is_stopped(int peer) const override { return group_.is_stopped(peer); }
  std::optional<int> find_culprit(const Operation& operation, const std::vector<int>& missing) override;
  std::string who_is(int peer) const override { return group_.who_is(peer); }
  void record_failure(const Operation& operation, const std::string& reason, int culprit) override;
  Failure recorded_failure() const override { return group_.failure(); }
  void let_go() override;

  void work();
  // Runs the first call, without the lock meanwhile.
  void run(std::unique_lock<std::mutex>& lock, Deadline deadline);
  bool run_unlocked(NetCall& call);

  NetGroup group_;
  NetMessages messages_;
  const bool shares_process_;

  NetCall* running_ = nullptr;
  std::condition_variable for_worker_, for_waiters_;
  bool worker_sleeps_ = false;   // until it is woken
  uint32_t seen_by_worker_ = 0;  // calls
  bool stopping_ = false;
  Clock::time_point next_question_{};  // after this rank has said goodbye
  std::thread worker_;
};

}  // namespace chorale::comm
