// Inside rpc: control messages have an effect once.
//
// Note [Control messages]
// A control message is sent again until it is answered, so it may come twice, and the second one however late: a
// request to count a user could come when that user, and the value, are long gone, and would bring both back. So the
// control messages from one worker to another are numbered, and the receiver keeps the numbers that it has heard: all
// up to one, and a few beyond. One that comes again is answered again, when the first is done, and does nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace chorale::rpc {

// Thread-safe.
class ControlNumbers {
 public:
  // A worker of a group that changes has its number and its ticket (Note [Groups that change]).
  using Worker = std::pair<int, uint64_t>;

  // The number of the next message to a worker.
  uint64_t next(const Worker& to);
  // A message came, as request `request`.
  enum class Heard : uint8_t {
    kFirst,  // it is to be handled, and then done() to be called
    kBusy,   // another thread does that, and gets this request from done()
    kDone,   // it was handled
  };
  Heard hear(const Worker& from, uint64_t number, uint64_t request);
  // It was handled. Requests that brought the same message meanwhile.
  std::vector<uint64_t> done(const Worker& from, uint64_t number);
  void forget(const Worker& worker);

 private:
  struct Numbers {
    uint64_t up_to = 0;  // all of these are done
    std::set<uint64_t> beyond{};
    std::map<uint64_t, std::vector<uint64_t>> busy{};  // with the requests that wait
  };
  std::mutex mutex_;
  std::map<Worker, uint64_t> sent_;
  std::map<Worker, Numbers> heard_;
};

}  // namespace chorale::rpc
