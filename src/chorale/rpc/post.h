// Inside rpc: messages between the workers of a group, over parcels (Note [Messages on the wire] in rpc/message.h).
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "chorale/comm/group.h"
#include "chorale/rpc/message.h"

namespace chorale::rpc {

// Something that came in.
struct Arrival {
  int from = -1;                     // -1: nothing will come any more
  std::optional<Message> message{};  // none: this worker is gone,
  std::string reason{};              // for this reason
};

// Thread-safe.
class Post {
 public:
  // Takes over the group, in which nobody else sends parcels.
  explicit Post(comm::Group group);

  int own() const { return rank_; }
  int size() const { return size_; }
  // Returns when the message is on its way. Throws RpcError (kConnection) when its receiver is gone. Tensors must not
  // be written before the receiver has taken them.
  void send(int to, const Message& message);
  // What came; nothing when nothing is there.
  std::optional<Arrival> take();
  // What comes next, whatever it is.
  struct Receiving {
    comm::Work work;
    uint64_t number = 0;
  };
  Receiving receiving() const;
  // Waits for it; nothing then means that another thread has taken it, or that there is nothing for a while.
  std::optional<Arrival> take(const Receiving& next, Deadline deadline);
  // Lets threads that wait for what comes next return. A thread that is to be woken must have asked what that is before
  // others could know that it waits: another thread may take what wakes it.
  void wake();
  // Whether this rank can still be reached and reach others.
  bool is_broken() const { return group_.is_broken(); }

 private:
  static constexpr uint64_t kMessages = 0;  // their tag; large tensors have one for each message
  comm::Work receive() const;
  Message complete(int from, Incoming incoming) const;

  comm::Group group_;
  const int rank_, size_;
  mutable std::mutex mutex_;
  comm::Work work_;  // what is received next
  uint64_t number_ = 0;
  std::atomic<uint64_t> tags_{kMessages};
};

}  // namespace chorale::rpc
