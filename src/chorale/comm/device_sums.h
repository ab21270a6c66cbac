// Inside comm: all-reduces of tensors on a device that all ranks of a group share, as threads or processes of one host.
// Bytes stay on the device; the host says when.
//
// Note [Sums on a shared device]
// A rank copies its tensor into memory that the others can map (device/peers.h), waits for that copy, and enters the
// call: an all-reduce of a few bytes, in which every rank names its memory to the others. It is watched as every call
// is: deadlines, deaths, fingerprints. When it is done, each rank adds up what all have, and only reads what is not its
// own: a rank that was stopped and goes on later does no harm. No stream and no kernel waits for another rank.
//
// Memory that a call used may be written again when a later call of the group is done: ranks enter that one only after
// they have read all of this one. What the last call of a group used goes to other groups after the group's deadline.
#pragma once

#include <chrono>
#include <mutex>
#include <vector>

#include "chorale/comm/call_builder.h"
#include "chorale/device/peers.h"

namespace chorale::comm {

// The memory that a rank lends to the others of a group.
class DeviceSums {
 public:
  DeviceSums(Device device, std::chrono::milliseconds timeout);
  ~DeviceSums();
  DeviceSums(const DeviceSums&) = delete;
  DeviceSums& operator=(const DeviceSums&) = delete;

  struct Lent {
    PeerHandle memory;
    uint64_t call = 0;  // by which it is used
  };
  Lent lend(size_t bytes);
  // The call is done: what earlier ones used is free.
  void note_done(const Lent& lent);

  Device device() const { return device_; }
  // On which this rank sums: those of callers may wait for the result, and ranks that are threads do not wait for each
  // other.
  Stream stream() const { return stream_; }

 private:
  const Device device_;
  const std::chrono::milliseconds timeout_;
  Stream stream_;
  std::mutex mutex_;
  uint64_t calls_ = 0;
  std::vector<PeerHandle> free_;
  std::vector<Lent> lent_;
};

// A call in which the ranks tell each other which device they have.
struct DeviceQuestion {
  DeviceQuestion(const std::shared_ptr<GroupState>& state, Device asked_for, const CallOptions& options);
  // Waits for the others. Every rank gets the same answer.
  bool all_share_one(int ranks) const;

  const Device device;
  const Tensor row;
  Work work;
  bool answered = false;
};

// Whether this call is made so. The first such call of a group asks the question and goes through the host, so that it
// need not wait; the second one waits for the answer.
bool sums_on_device(const std::shared_ptr<GroupState>& state, const Tensor& tensor, Reduction reduction,
                    const CallOptions& options);
Work all_reduce_on_device(const std::shared_ptr<GroupState>& state, const Tensor& tensor, Reduction reduction,
                          const CallOptions& options);

}  // namespace chorale::comm
