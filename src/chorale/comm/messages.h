// Inside comm: point-to-point messages of a group on one host.
//
// A mailbox per ordered pair of ranks carries messages in order. Small ones hold their data; of a large one only the
// place travels, and the receiver answers when it has taken the data. The receiver empties mailboxes as they fill and
// keeps what nobody asks for yet, so that a message with another tag, or an answer, is never stuck behind it.
#pragma once

#include <deque>
#include <vector>

#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class Messages {
 public:
  explicit Messages(ShmGroup& group);

  void submit(const Intrusive<Operation>& operation);
  // Whether a message for this receive, which was not submitted, is there; and takes it. `done` gets what else is
  // finished on the way.
  bool has_message(const Operation& receive, std::vector<Intrusive<Operation>>& done);
  bool take_message(Operation& receive, std::vector<Intrusive<Operation>>& done);
  // Moves everything as far as it goes; `done` gets the operations that are finished.
  void progress(std::vector<Intrusive<Operation>>& done);
  bool idle() const { return posted_.empty() && sending_.empty() && unanswered_.empty() && answers_.empty(); }
  // One of those in flight; null when there is none.
  Intrusive<Operation> pending() const;
  // Who is owed an answer, and to whom none need be sent any more.
  std::vector<int> answered() const;
  void drop_answers_to(const std::vector<int>& ranks);
  // All that is in flight, given up.
  std::vector<Intrusive<Operation>> abandon();
  // Sends whose data a peer may be reading.
  bool is_exposed() const { return !unanswered_.empty(); }

 private:
  // A message that nobody has asked for yet.
  struct Early {
    shm::MessageKind kind;
    DType dtype;
    uint64_t id, tag, bytes;
    shm::Place place;
    std::optional<uint32_t> crc;
    std::vector<std::byte> data;
  };
  struct Answer {
    int to;
    uint64_t id;
  };

  bool room_to(int peer) const;
  shm::Message& next_to(int peer) const;
  void fill(int peer);
  void send_all(std::vector<Intrusive<Operation>>& done);
  bool start_send(Operation& operation);
  void empty_mailbox(int from, std::vector<Intrusive<Operation>>& done);
  // The sender of the first early message that fits; -1: none.
  int early_sender(const Operation& receive) const;
  bool match_early(Operation& receive);
  void deliver(Operation& receive, int from, const Early& message, const std::byte* inline_data);

  ShmGroup& group_;
  std::vector<std::deque<Early>> early_;  // by sender
  size_t early_bytes_ = 0;
  std::deque<Intrusive<Operation>> sending_;      // not in a mailbox yet
  std::vector<Intrusive<Operation>> unanswered_;  // sends that were announced as ready
  std::deque<Intrusive<Operation>> posted_;       // receives
  std::deque<Answer> answers_;
  uint64_t next_id_ = 1;
};

}  // namespace chorale::comm
