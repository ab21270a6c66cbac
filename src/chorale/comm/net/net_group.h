// Inside comm: what the parts of an engine for several hosts share: members and their hosts, the engine of this host,
// the first failure, and what is known of the peers on other hosts.
//
// Note [Notices overtake]
// A failure, or that a rank left, is told past all messages. A rank may hear of it while data of a call that its sender
// had finished before is still on its way. So each notice names the first call that the sender did not finish: calls
// before that one go on, for a moment at least (kInFlight), because what they wait for has been sent. Neighbours that
// wait for each other hear of it (through their segment) when this rank has come to that call.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "chorale/comm/net/net_hub.h"
#include "chorale/comm/net/net_layout.h"
#include "chorale/comm/shm/shm_engine.h"

namespace chorale::comm {

class NetGroup final : public NetListener {
 public:
  using Clock = Deadline::Clock;
  static constexpr Clock::duration kInFlight = std::chrono::seconds(1);

  // `local` is the engine of the members on this host.
  NetGroup(const Membership& membership, const AlgorithmTable& table, NetLayout layout, std::shared_ptr<NetHub> hub,
           uint64_t id, std::shared_ptr<ShmEngine> local);
  void note_exception(const std::string& what);
  // Tells the others that this rank leaves, after it has finished `last` calls, and hears no more of them; or hears on.
  void leave(uint32_t last, bool threw);
  void say_goodbye(uint32_t last);
  // Whether a peer has left, too, or is gone.
  enum class Stay : uint8_t { kHere, kLeft, kThrew };
  Stay stay_of(int peer) const;
  ~NetGroup() = default;

  const Membership& membership;  // the engine's
  const AlgorithmTable& table;   // the rank's
  const NetLayout layout;
  const std::shared_ptr<NetHub> hub;
  const uint64_t id;  // the same on all members, and of this group alone
  const std::shared_ptr<ShmEngine> local;

  transport::Fabric& fabric() const { return hub->fabric(); }
  int rank() const { return membership.rank; }
  int size() const { return membership.size(); }
  int global(int peer) const { return membership.global(peer); }

  // ---- the first failure

  bool failed() const { return failed_.load(std::memory_order_acquire) || local->is_broken(); }
  // Whether the group has failed in a way that ends this call (Note [Notices overtake]).
  bool fails(uint32_t number) const;
  // The same of whatever is in flight now; the engine says which call was finished last.
  bool fails() const { return fails(finished_.load(std::memory_order_relaxed) + 1); }
  void note_finished(uint32_t number) { finished_.store(number, std::memory_order_relaxed); }
  // This rank begins that call. Peers that ask are told.
  void enter(uint32_t number, const Fingerprint& print);
  // The first failure, also where a neighbour has found it.
  Failure failure() const;
  // Records it and tells everybody, unless there is one already.
  void fail(uint32_t number, const std::string& reason, int culprit);
  // This rank ends everything in that call: neighbours hear of a failure elsewhere, and the other hosts of one here, if
  // it was found by this rank.
  void share_failure(uint32_t number);

  // ---- peers

  // Why call `number` gets nothing more from this peer, and the culprit, if that is so.
  std::optional<CallFailed> gone(int peer, uint32_t number) const;
  // Says that a peer got something damaged from this rank, if that is so.
  std::optional<CallFailed> accusation() const;
  // Says that a rank on another host is lost, if that is so. This is a better reason than that another rank has left or
  // taken a message back, which it may have done because of the loss.
  std::optional<CallFailed> lost_one() const;
  bool is_silent(int peer) const;        // on another host
  bool is_stopped_here(int peer) const;  // a neighbour
  bool is_stopped(int peer) const { return layout.is_here(peer) ? is_stopped_here(peer) : is_silent(peer); }
  // The last call that a rank is known to have entered: number 0 when none is.
  struct Whereabouts {
    uint32_t number = 0;
    Fingerprint print;
  };
  Whereabouts whereabouts(int peer) const;
  // Asks everybody on other hosts; answers come within a moment from all whose fabric runs.
  void ask_where() const;
  bool has_answered(int peer, Clock::time_point since) const;
  // "rank 3 (on another host, 10.0.0.7)", by its global rank
  std::string elsewhere(int global_rank) const;
  // "rank 3 (on another host, 10.0.0.7, silent for 3.2 s: …) last entered all_reduce of 1000 f32 (sum) #12"
  std::string who_is(int peer) const;

  // What others are told of this rank when an exception takes the group along while a call runs; `finished` is the last
  // call before it.
  std::string why_it_leaves(uint32_t finished) const;

  StopWatch stop_watch;  // of the thread that runs a call

 private:
  void hear(int from, const Notice& notice) override;
  // `number` is that of the call that the reporter was in.
  bool record(Failure failure, uint64_t number);
  std::string where_is(int peer) const;
  std::string describe_call(const Whereabouts& where) const;

  const std::vector<int> others_;  // global ranks on other hosts

  mutable std::mutex mutex_;  // guards the rest
  std::atomic<bool> failed_{false};
  Failure failure_;
  uint64_t failed_in_ = 0;  // the call that the reporter was in
  Clock::time_point heard_;
  std::atomic<uint32_t> finished_{0};
  Whereabouts entered_;  // the last call that this rank has begun
  struct Answer {
    Whereabouts where;
    Clock::time_point heard{};
  };
  std::vector<Answer> answers_;  // by group rank
  struct Departure {
    bool threw = false;
    uint64_t number = 0;
    Clock::time_point heard;
  };
  std::vector<std::optional<Departure>> departures_;  // by group rank
  bool said_goodbye_ = false;                         // of the engine's threads, with its lock
  struct Thrown {
    uint32_t number = 0;  // of the last call before it
    std::string text;
  };
  std::vector<Thrown> thrown_;  // by group rank
};

}  // namespace chorale::comm
