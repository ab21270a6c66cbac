// Inside comm: point-to-point messages of a group that spans hosts. Those between neighbours go through the engine of
// their host, the others through the fabric, one channel per tag. A receive from any source is posted to the fabric;
// when a neighbour's message is found first, that is taken back.
#pragma once

#include <vector>

#include "chorale/comm/message_queue.h"
#include "chorale/comm/net/net_inquiry.h"

namespace chorale::comm {

class NetMessages final : public MessageQueue {
 public:
  explicit NetMessages(NetGroup& group) : group_(group) {}
  ~NetMessages() override { abandon(); }

  void submit(const base::Intrusive<Operation>& operation) override;
  void progress(std::vector<base::Intrusive<Operation>>& done) override;
  bool idle() const override { return pending_.empty(); }
  base::Intrusive<Operation> pending() const override {
    return pending_.empty() ? base::Intrusive<Operation>() : pending_.front().operation;
  }
  bool remove(const Operation& parcel) override;
  std::vector<base::Intrusive<Operation>> abandon() override;

  // The rank that holds up a message whose time is over.
  NetInquiry& inquiry(const Operation& operation);

 private:
  struct Pending {
    base::Intrusive<Operation> operation;
    transport::TransferHandle transfer;  // through the fabric
    base::Intrusive<Operation> here;     // through the engine of this host
    std::unique_ptr<NetInquiry> inquiry = nullptr;
  };

  bool is_done(Pending& pending);
  bool is_here_done(Pending& pending);
  // Looks for what the receive of a parcel waits for: true when something was found elsewhere.
  bool find_parcel(Pending& pending);
  void look_for_parcel(Pending& pending);
  void submit_here(Pending& pending);
  void let_go(const Pending& pending);
  void check(const Operation& receive, const transport::Transfer& transfer) const;
  uint64_t channel(const Operation& operation) const;
  base::Intrusive<Operation> local_form(const Operation& operation) const;

  NetGroup& group_;
  std::vector<Pending> pending_;
};

}  // namespace chorale::comm
