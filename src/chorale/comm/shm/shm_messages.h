// Inside comm: point-to-point messages of a group on one host.
//
// A mailbox per ordered pair of ranks carries messages in order. Small ones hold their data; of a large one only the
// place travels, and the receiver answers when it has taken the data. The receiver empties mailboxes as they fill and
// keeps what nobody asks for yet, so that a message with another tag, or an answer, is never stuck behind it.
#pragma once

#include <deque>
#include <vector>

#include "chorale/comm/message_queue.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class ShmMessages final : public MessageQueue {
 public:
  explicit ShmMessages(ShmGroup& group);
  ~ShmMessages() override { abandon(); }

  void submit(const Intrusive<Operation>& operation) override;
  void progress(std::vector<Intrusive<Operation>>& done) override;
  bool idle() const override {
    return posted_.empty() && sending_.empty() && exposed_.empty() && answers_.empty() && finished_.empty();
  }
  Intrusive<Operation> pending() const override;
  std::vector<Intrusive<Operation>> abandon() override;

  // Whether a message for this receive, which was not submitted, is there; and takes it.
  bool has_message(const Operation& receive);
  bool take_message(Operation& receive);
  // Answers that found no room are still owed, unless their receivers are gone.
  template <class IsGone>
  void drop_answers(const IsGone& is_gone) {
    std::erase_if(answers_, [&](const Answer& answer) { return is_gone(answer.to); });
  }
  // Sends whose data a peer may be reading.
  bool is_exposed() const { return !exposed_.empty(); }

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
  // A send that was announced as ready: the receiver has not answered yet.
  struct Exposed {
    Intrusive<Operation> operation;
    uint64_t id;
    memory::Block scratch;  // where the data had to be copied to
  };

  bool room_to(int peer) const;
  shm::Message& next_to(int peer) const;
  void fill(int peer);
  void send_all();
  void start_send(const Intrusive<Operation>& operation);
  void empty_mailbox(int from);
  void end_exposure(int from, uint64_t id);
  // The sender of the first early message that fits; -1: none.
  int early_sender(const Operation& receive) const;
  bool match_early(Operation& receive);
  void deliver(Operation& receive, int from, const Early& message, const std::byte* inline_data);

  ShmGroup& group_;
  std::vector<std::deque<Early>> early_;  // by sender
  size_t early_bytes_ = 0;
  std::deque<Intrusive<Operation>> sending_;  // not in a mailbox yet
  std::vector<Exposed> exposed_;
  std::deque<Intrusive<Operation>> posted_;  // receives
  std::deque<Answer> answers_;
  std::vector<Intrusive<Operation>> finished_;  // and progress() has not said so
  uint64_t next_id_ = 1;
};

}  // namespace chorale::comm
