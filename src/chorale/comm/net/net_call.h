// Inside comm: one collective between hosts while it runs, as the algorithms (algorithm/net_*.cc) see it. They are
// plain blocking code: messages to and from ranks on other hosts, and calls among the ranks of this host.
//
// Note [Frame of a call between hosts]
// Every call begins with a call among the neighbours, which compares their fingerprints; then the leaders hear from
// each other, data or at least an empty message, and compare theirs; it ends with another call among the neighbours,
// which their leader enters after that. So nobody ever finishes a call that some rank did not make, as on one host.
// When they differ, or a rank stays away: Note [Finding the culprit] in net_inquiry.h.
#pragma once

#include <atomic>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "chorale/comm/net/net_inquiry.h"
#include "chorale/tensor/tensor.h"

namespace chorale::comm {

class NetCall {
 public:
  using Clock = Deadline::Clock;

  NetCall(NetGroup& group, Operation& operation, Deadline deadline);
  // What is still on its way is cancelled: nobody writes into memory that the caller has back.
  ~NetCall();
  NetCall(const NetCall&) = delete;
  NetCall& operator=(const NetCall&) = delete;

  NetGroup& group;
  Operation& operation;
  const NetLayout& layout;

  // ---- other hosts. Peers are group ranks. Between two ranks, messages are received in the order in which they are
  // sent. All of these throw GroupFailed or CallFailed.

  using Ticket = size_t;
  Ticket send(int peer, Chunk data);
  Ticket receive(int peer, Chunk into);
  void await(Ticket ticket);
  void await_all();
  // Leaders send each other an empty message, for calls in which they send nothing else: after the first call here.
  void greet();

  // ---- this host

  struct Here {
    CallKind kind;
    std::vector<Chunk> give, take;  // Note [Give and take]; chunks by index on this host
    int root = -1;                  // index on this host
    DType dtype = DType::kU8;
    Reduction reduction{Reduce::kNone};
  };
  void here(const Here& what);
  void meet_here();

  // ---- one rank and another, wherever they are: "I am there". hear() is false when the time is over.

  void tell(int peer);
  bool hear(int peer, Deadline deadline);

  // Memory for what travels; it lives until nothing of this call is on its way any more.
  const Tensor& buffer(int64_t elems, DType dtype = DType::kU8);

  // ---- for the thread that waits for it

  // Another thread wants it done before this; it is an error if it is not.
  void shorten(Deadline deadline);

  // Which way a call goes; the others must go the same (algorithm/table.h).
  void set_algorithm(Algorithm algorithm) { algorithm_ = static_cast<uint32_t>(algorithm); }

 private:
  struct Posted {
    transport::TransferHandle transfer;
    int peer;
    uint32_t step;  // among the messages between the two in this call, in one direction
    size_t bytes;
    bool received;
    bool open = true;
  };

  transport::Envelope envelope(uint32_t step) const;
  Ticket post(Posted posted);
  // Looks at what is done by now; true when `wanted` is, or all are.
  bool settle(std::optional<Ticket> wanted);
  void check(const Posted& posted);
  void wait_for(std::optional<Ticket> wanted);
  // Throws the reason, if there is one, why this takes long. `here`: neighbours that are awaited.
  void look(std::optional<Ticket> wanted, std::span<const int> here);
  base::Intrusive<Operation> message_here(CallKind kind, int peer) const;
  void submit_here(const base::Intrusive<Operation>& local);
  std::vector<int> awaited() const;
  void say_who_is_awaited(std::span<const int> peers);

  std::deque<Tensor> buffers_;
  std::vector<Posted> posted_;
  std::vector<Ticket> open_;
  std::vector<uint32_t> sent_, received_;  // messages to and from each rank
  NetInquiry inquiry_;
  uint32_t algorithm_ = 0;
  std::atomic<Clock::rep> end_;
  WaitingWord word_;
};

}  // namespace chorale::comm
