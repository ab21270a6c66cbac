// Inside comm: point-to-point messages of a group that spans hosts. Those between neighbours go through the engine of
// their host, the others through the fabric, one channel per tag. A receive from any source is posted to the fabric;
// when a neighbour's message is found first, that is taken back.
#pragma once

#include <vector>

#include "chorale/comm/net/net_inquiry.h"

namespace chorale::comm {

class NetMessages {
 public:
  explicit NetMessages(NetGroup& group) : group_(group) {}
  ~NetMessages();
  NetMessages(const NetMessages&) = delete;
  NetMessages& operator=(const NetMessages&) = delete;

  void submit(const Intrusive<Operation>& operation);
  // Moves everything as far as it goes; `done` gets the operations that are finished. Throws GroupFailed or CallFailed.
  void progress(std::vector<Intrusive<Operation>>& done);
  bool idle() const { return pending_.empty(); }
  Intrusive<Operation> pending() const {
    return pending_.empty() ? Intrusive<Operation>() : pending_.front().operation;
  }
  // Throws the reason why it does not come, if there is one; to be called now and then. Says for whom this rank waits
  // when that takes long.
  void look(const Operation& operation, Deadline deadline);
  // Waits a little for something to happen after the event `seen` of the fabric, without the lock of the engine.
  void wait_for_event(const Operation& operation, int64_t rounds, uint32_t seen) const;
  // All that is in flight, given up.
  std::vector<Intrusive<Operation>> abandon();

 private:
  struct Pending {
    Intrusive<Operation> operation;
    transport::TransferHandle transfer;     // through the fabric
    Intrusive<Operation> here;              // through the engine of this host
    std::optional<Deadline> patience = {};  // after it failed for a reason that we may hear soon
    std::unique_ptr<NetInquiry> inquiry = nullptr;
    Deadline::Clock::duration next_word = kFirstWord;  // after it was issued
  };

  // After so long one says for whom one waits, and then whenever the time has doubled.
  static constexpr Deadline::Clock::duration kFirstWord = std::chrono::seconds(5);

  bool is_done(Pending& pending);
  // Throws: at once, or, where somebody may know better who is to blame, when he has had time to say so.
  static void raise(Pending& pending, const CallFailed& reason);
  void say_who_is_awaited(Pending& pending, const std::vector<int>& peers) const;
  void check(const Operation& receive, const transport::Transfer& transfer) const;
  uint64_t channel(uint64_t tag) const;
  Intrusive<Operation> local_form(const Operation& operation) const;

  NetGroup& group_;
  std::vector<Pending> pending_;
};

}  // namespace chorale::comm
