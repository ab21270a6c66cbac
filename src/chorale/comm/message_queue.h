// Inside comm: the messages between two ranks that one rank has in flight, whatever carries them.
//
// Note [Parcels]
// The receiver of a plain message knows its size, and asks for it; a failure in one breaks the group. A parcel is for
// ranks that serve requests: its receiver knows neither its size nor, perhaps, its sender. It takes nothing larger than
// it says, and memory is taken when the size is known and small enough. A parcel fails alone, and the group goes on:
// one that could not be handed over within its time, whose receiver is gone, that is too large, that was damaged.
// Parcels and plain messages never meet, whatever their tags.
//
// A parcel is sent when its bytes are on their way and its caller may have its memory back; whether it was received,
// only an answer shows. A receive from any source fails once for every rank that has gone, so that a rank that serves
// requests hears of each death, and after that it waits for the others. What a rank sent before it went is
// received first.
#pragma once

#include <utility>
#include <vector>

#include "chorale/comm/failure.h"
#include "chorale/comm/operation.h"

namespace chorale::comm {

class MessageQueue {
 public:
  MessageQueue() = default;
  virtual ~MessageQueue() = default;
  MessageQueue(const MessageQueue&) = delete;
  MessageQueue& operator=(const MessageQueue&) = delete;

  // These two throw GroupFailed or CallFailed.
  virtual void submit(const base::Intrusive<Operation>& operation) = 0;
  // Moves everything as far as it goes; `done` gets the operations that are finished.
  virtual void progress(std::vector<base::Intrusive<Operation>>& done) = 0;
  virtual bool idle() const = 0;
  // One of those in flight; null when there is none. A queue that is not idle may still have none: then it owes a word
  // to a peer.
  virtual base::Intrusive<Operation> pending() const = 0;
  // Gives up one parcel. False when it is not in flight any more.
  virtual bool remove(const Operation& parcel) = 0;
  // All that is in flight, given up.
  virtual std::vector<base::Intrusive<Operation>> abandon() = 0;

  // Parcels that have failed in progress(), each for itself.
  using Failed = std::vector<std::pair<base::Intrusive<Operation>, CallFailed>>;
  Failed take_failed() { return std::exchange(failed_, {}); }

 protected:
  Failed failed_;
};

// The memory for a parcel of this size: `there`, if it has come to lie there already. Throws CallFailed when the
// receive takes no such thing.
Chunk room_for_parcel(const Membership& membership, Operation& receive, int from, uint64_t bytes,
                      const Tensor& there = {});

}  // namespace chorale::comm
