// Inside comm: point-to-point messages of an mpi group.
//
// MPI's tags are ints and a message that is too long is lost, so matching is ours: a header with the caller's tag, the
// dtype and the size comes first, with the data in it when that is little. Other data follows as a message of its own,
// whose tag the header names, and is received straight into its place once somebody has asked for it.
#pragma once

#include <deque>
#include <list>
#include <vector>

#include "chorale/comm/message_queue.h"
#include "chorale/comm/mpi/mpi_call.h"

namespace chorale::comm {

class MpiMessages final : public MessageQueue {
 public:
  explicit MpiMessages(const MpiGroup& group)
      : group_(group), next_tags_(static_cast<size_t>(group.size()), kFirstDataTag) {}

  void submit(const base::Intrusive<Operation>& operation) override;
  void progress(std::vector<base::Intrusive<Operation>>& done) override;
  bool idle() const override { return posted_.empty() && moving_.empty(); }
  base::Intrusive<Operation> pending() const override;
  bool remove(const Operation&) override { return false; }  // there are no parcels
  // Memory that MPI still uses stays MPI's.
  std::vector<base::Intrusive<Operation>> abandon() override;

 private:
  struct Header {
    uint64_t tag = 0, bytes = 0;
    uint32_t dtype = 0;
    int32_t data_tag = 0;  // 0: the data is behind the header
  };
  // A send, or a receive whose message has come.
  struct Moving {
    base::Intrusive<Operation> operation;
    std::vector<std::byte> header;
    std::vector<transport::Mpi::Request> requests;
  };
  struct Early {
    int from = -1;
    std::vector<std::byte> message;  // with its header
  };

  void send(const base::Intrusive<Operation>& operation);
  void collect();
  static Header header_of(const std::vector<std::byte>& message);
  void deliver(const base::Intrusive<Operation>& receive, int from, const std::vector<std::byte>& message);
  // Data in as many messages as MPI's counts need.
  template <class Start>
  void in_pieces(Moving& moving, const Chunk& chunk, const Start& start) const;

  const MpiGroup& group_;
  std::vector<int> next_tags_;  // by destination
  std::deque<base::Intrusive<Operation>> posted_;
  std::deque<Early> early_;
  std::list<Moving> moving_;
};

}  // namespace chorale::comm
