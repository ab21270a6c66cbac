// Inside comm: the engine of groups whose ranks are on several hosts.
//
// Note [Who runs a call]
// Calls run in order, one at a time, each as plain blocking code without the lock (net_call.h): by the thread that
// waits for it when nothing else runs, which saves a hand-over, else by a worker thread of the group, so that
// communication overlaps what the caller does meanwhile. Waking that thread costs more than a small call; so after a
// call it stays half awake for a while, looks for new ones by itself, and is left alone by who submits them. Messages
// between two ranks need no thread: the fabric has one.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>

#include "chorale/comm/flight.h"
#include "chorale/comm/net/net_call.h"
#include "chorale/comm/net/net_messages.h"

namespace chorale::comm {

class NetEngine final : public Engine {
 public:
  // `local` is the engine of the members on this host, `id` the same on all members.
  NetEngine(std::shared_ptr<RankContext> context, Membership membership, NetLayout layout, uint64_t id,
            std::shared_ptr<ShmEngine> local);
  // Finishes what is in flight, unless an exception is passing through: then the others are told.
  ~NetEngine() override;

  const char* backend() const override { return group_.fabric().name(); }
  void submit(const Intrusive<Operation>& operation) override;
  void progress() override;
  bool idle() const override { return calls_.empty() && messages_.idle(); }
  void wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                     Deadline deadline) override;
  void note_exception(const std::string& what) override;
  void look(Operation& operation) override;
  std::string flight_record() const override { return flight_.json(membership(), {}); }
  uint32_t last_number() const override { return number_; }
  bool is_broken() const override { return group_.failed(); }
  const NetGroup& group() const { return group_; }

 private:
  void work();
  // Runs the first call, without the lock meanwhile.
  void run(std::unique_lock<std::mutex>& lock, Deadline deadline);
  bool run_unlocked(NetCall& call);
  void finish(Operation& operation, const std::exception_ptr& error);
  // With the lock: the group has failed, and everything ends with that.
  void end_all(const Operation& operation);
  template <class F>
  void guarded(const Operation& operation, const F& run);

  NetGroup group_;
  NetMessages messages_;
  std::deque<Intrusive<Operation>> calls_;
  std::vector<Intrusive<Operation>> done_;  // reused
  FlightRecorder flight_;
  uint32_t number_ = 0, finished_ = 0;
  std::exception_ptr broken_;
  int exceptions_at_birth_ = 0;

  NetCall* running_ = nullptr;
  std::condition_variable for_worker_, for_waiters_;
  bool worker_sleeps_ = false;   // until it is woken
  uint32_t seen_by_worker_ = 0;  // calls
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace chorale::comm
