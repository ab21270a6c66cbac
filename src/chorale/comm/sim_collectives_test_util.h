// Plays for tests what devices do between and among each other (device/collectives.h, device/peers.h), on simulated
// devices, by threads of this process.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "chorale/device/collectives.h"
#include "chorale/device/peers.h"

namespace chorale::comm {

// A library between simulated devices. A call begins when its stream comes to it, waits there for the other ranks, and
// then moves the bytes.
class SimCollectives final : public DeviceCollectives {
 public:
  // What goes wrong, by the number of a rank's call in its communicator, from 1 on; 0: nothing.
  struct Script {
    int rank = 1;
    int hangs_at = 0;      // its device never comes to this call
    int fails_at = 0;      // it says so behind this call
    bool no_init = false;  // it never comes to the meeting
    bool refuses = false;  // it cannot begin
    std::string why_not{};
  };
  Script script;
  std::atomic<int> begun = 0, aborted = 0, ended = 0, calls = 0;

  std::string why_not() override { return script.why_not; }
  std::array<std::byte, 16> identity(Device device) override;
  bool can(const DeviceReduction& how) override;
  Id make_id() override;
  std::unique_ptr<DeviceComm> begin(const Id& id, Device device, int rank, int size) override;

  struct Meeting;

 private:
  std::mutex mutex_;
  std::map<Id, std::shared_ptr<Meeting>> meetings_;
  uint64_t last_id_ = 0;
};

// Memory of a simulated device that the threads of this process lend each other.
class SimPeers final : public PeerMemory {
 public:
  std::array<std::byte, 16> identity(Device device) override;
  PeerHandle make(Device device, size_t bytes) override;
  const void* open(Device device, const PeerHandle& handle) override;
  void sum(std::span<const void* const> sources, DType dtype, double factor, double divisor, void* out, int64_t elems,
           Stream stream) override;
  std::atomic<int> made = 0, opened = 0, sums = 0;
};

}  // namespace chorale::comm
