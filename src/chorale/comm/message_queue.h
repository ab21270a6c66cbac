// Inside comm: the messages between two ranks that one rank has in flight, whatever carries them.
#pragma once

#include <vector>

#include "chorale/comm/operation.h"

namespace chorale::comm {

class MessageQueue {
 public:
  MessageQueue() = default;
  virtual ~MessageQueue() = default;
  MessageQueue(const MessageQueue&) = delete;
  MessageQueue& operator=(const MessageQueue&) = delete;

  // These two throw GroupFailed or CallFailed.
  virtual void submit(const Intrusive<Operation>& operation) = 0;
  // Moves everything as far as it goes; `done` gets the operations that are finished.
  virtual void progress(std::vector<Intrusive<Operation>>& done) = 0;
  virtual bool idle() const = 0;
  // One of those in flight; null when there is none. A queue that is not idle may still have none: then it owes a word
  // to a peer.
  virtual Intrusive<Operation> pending() const = 0;
  // All that is in flight, given up.
  virtual std::vector<Intrusive<Operation>> abandon() = 0;
};

}  // namespace chorale::comm
