// Inside rpc: messages between the workers of a group, over parcels (Note [Messages on the wire] in rpc/message.h).
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "chorale/comm/group.h"
#include "chorale/rpc/message.h"

namespace chorale::rpc {

// Something that came in.
struct Arrival {
  int from = -1;                     // -1: nothing will come any more
  std::optional<Message> message{};  // none: this worker is gone,
  std::string reason{};              // for this reason
  uint64_t ticket = 0;               // of a worker of a group that changes (Note [Groups that change])
};

// Thread-safe.
class Post {
 public:
  // Takes over the group, in which nobody else sends parcels.
  explicit Post(comm::Group group);
  ~Post();
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;

  // In a group that changes each worker has a link to every other: a group of two, and a thread that reads. The group
  // of the constructor is then of this worker alone.
  struct Link;
  std::shared_ptr<Link> add_link(int worker, uint64_t ticket, comm::Group pair);
  // Reads from now on.
  void open(const std::shared_ptr<Link>& link);
  void drop_link(int worker, uint64_t ticket);

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

 private:
  static constexpr uint64_t kMessages = 0;  // their tag; large tensors have one for each message
  comm::Work receive() const;
  static Message complete(const comm::Group& group, int rank, Incoming incoming);
  void read_link(Link& link);
  std::optional<Arrival> take_from_links();

  comm::Group group_;
  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<Link>> links_;  // by worker
  std::deque<std::shared_ptr<Link>> dropped_;   // whose threads end
  std::deque<Arrival> arrivals_;                // that came over links
  std::atomic<bool> has_links_{false};
  comm::Work work_;  // what is received next
  uint64_t number_ = 0;
  std::atomic<uint64_t> tags_{kMessages};
};

}  // namespace chorale::rpc
