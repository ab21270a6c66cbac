// Inside comm: point-to-point messages of a group on one host.
//
// A mailbox per ordered pair of ranks carries messages in order. Small ones hold their data; of a large one only the
// place travels, and the receiver answers when it has taken the data. The receiver empties mailboxes as they fill and
// keeps what nobody asks for yet, so that a message with another tag, or an answer, is never stuck behind it.
#pragma once

#include <deque>
#include <vector>

#include "chorale/comm/lent_parcels.h"
#include "chorale/comm/message_queue.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class ShmMessages final : public MessageQueue {
 public:
  explicit ShmMessages(ShmGroup& group);
  ~ShmMessages() override { abandon(); }

  void submit(const base::Intrusive<Operation>& operation) override;
  void progress(std::vector<base::Intrusive<Operation>>& done) override;
  bool idle() const override {
    return posted_.empty() && waiting_sends_ == 0 && exposed_.empty() && answers_.empty() && finished_.empty() &&
           failed_.empty();
  }
  base::Intrusive<Operation> pending() const override;
  std::vector<base::Intrusive<Operation>> abandon() override;

  bool remove(const Operation& parcel) override;

  // Whether a message for this receive, which was not submitted, is there; and takes it.
  bool has_message(const Operation& receive);
  bool take_message(const base::Intrusive<Operation>& receive);
  // Answers that found no room are still owed, and parcels are kept for their receivers, unless those are gone.
  template <class IsGone>
  void drop_what_nobody_takes(const IsGone& is_gone) {
    std::erase_if(answers_, [&](const Answer& answer) { return is_gone(answer.to); });
    std::erase_if(exposed_, [&](const Exposed& exposed) {
      if (exposed.operation || !is_gone(exposed.to)) return false;
      release(exposed);
      return true;
    });
  }
  // Parcels whose time is over while nobody has taken them: their memory is left for ever, since their receivers may
  // still read it.
  void leave_parcels() {
    std::erase_if(exposed_, [](Exposed& exposed) {
      const bool late = !exposed.operation && exposed.deadline.passed();
      if (late) exposed.lent.leave();
      return late;
    });
  }
  // Sends whose data a peer may be reading.
  bool is_exposed() const { return !exposed_.empty(); }

 private:
  // A message that nobody has asked for yet.
  struct Early {
    bool is_parcel;
    shm::MessageKind kind;
    DType dtype;
    uint64_t id, tag, bytes;
    shm::Place place;
    std::optional<uint32_t> crc;
    Tensor data;  // of an inline message
  };
  struct Answer {
    int to;
    uint64_t id;
  };
  // A send that was announced as ready: the receiver has not answered yet.
  struct Exposed {
    base::Intrusive<Operation> operation;  // null for a parcel: it is sent
    int to;
    uint64_t id, bytes;
    Deadline deadline;
    memory::Block scratch;  // where the data had to be copied to
    Lent lent;              // or where it is (Note [Lent parcels] in comm/lent_parcels.h)
  };

  // Whether a message with so much data fits into the mailbox now.
  bool has_room(int peer, size_t inline_bytes);
  shm::Message& next_to(int peer) const;
  void fill(int peer);
  static size_t inline_bytes(const Operation& send) {
    const size_t bytes = send.give[0].bytes;
    return bytes <= shm::MessageHead::most_inline(send.is_parcel) ? bytes : 0;
  }
  void send_all();
  void send_to(int peer);
  void start_send(const base::Intrusive<Operation>& operation);
  void empty_mailboxes();
  void empty_mailbox(int from);
  void end_exposure(int from, uint64_t id);
  void release(const Exposed& exposed);
  static bool fits(const Operation& receive, int from, bool is_parcel, uint64_t tag) {
    return receive.is_parcel == is_parcel && receive.tag == tag && (receive.peer < 0 || receive.peer == from);
  }
  // The sender of the first early message that fits; -1: none.
  int early_sender(const Operation& receive) const;
  bool match_early(const base::Intrusive<Operation>& receive);
  // Copies the message into the receive, which is finished then; or, if it is a parcel, may have failed. `data`: of an
  // inline message that is still in the mailbox.
  void deliver(const base::Intrusive<Operation>& receive, int from, const Early& message, const std::byte* data);
  void copy(Operation& receive, int from, const Early& message, const std::byte* data);

  ShmGroup& group_;
  std::vector<std::deque<Early>> early_;  // by sender
  std::vector<uint32_t> emptied_;         // by receiver: of the mailbox to it, when that was last looked at
  size_t early_bytes_ = 0;
  std::vector<uint64_t> posted_bytes_;                           // by receiver: of parcels that it has not taken yet
  std::vector<std::deque<base::Intrusive<Operation>>> sending_;  // by receiver: not in a mailbox yet,
  size_t waiting_sends_ = 0;                                     // and how many there are
  std::vector<Exposed> exposed_;
  std::deque<base::Intrusive<Operation>> posted_;  // receives
  std::deque<Answer> answers_;
  std::vector<base::Intrusive<Operation>> finished_;  // and progress() has not said so
  uint64_t next_id_ = 1;
  int last_sender_ = 0;  // of the last message that was taken: a receive from anybody looks at the next one first
};

}  // namespace chorale::comm
