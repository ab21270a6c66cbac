// Inside comm: collectives whose bytes stay on devices. The host's engine says when, and watches.
//
// Note [Calls by devices]
// The first call of a group on tensors of a device asks which device each rank has, and goes through the host; from the
// second on there are three ways, the same one on all ranks:
// - all ranks share one device: Note [Calls on a shared device];
// - each has its own, and a library moves bytes between them (device/collectives.h): Note [Calls between devices];
// - otherwise, and for what the device cannot reduce: through copies on the host, as every call did before.
// In the first two ways the host's engine sees a call of a few bytes with the fingerprint of the real one: it is
// watched as every call is (deadlines, deaths, different calls), and when it is done, all ranks have come. Then the
// device's part begins (DevicePart), which belongs to the call and ends it.
//
// Note [Calls on a shared device]
// A rank copies what it gives into memory that the others can map (device/peers.h), waits for that copy, and enters the
// call, in which it names that memory to the others. When it is done, each rank takes what it needs from memory of all,
// and only reads what is not its own: a rank that was stopped and goes on later does no harm. No stream and no kernel
// waits for another rank.
//
// Note [Calls between devices]
// Each rank puts the call on a stream of the group's, behind what its tensors wait for. There the devices wait for each
// other, so calls of two groups whose ranks put them on their devices in different orders may hold each other up, as
// the library's own rules say. The host looks at the library's errors, at its peers and at the time while it waits. A
// group that fails aborts its communicator, so that nothing hangs on the device; then the tensors of its calls hold
// anything.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chorale/comm/device_part.h"
#include "chorale/comm/group_state.h"
#include "chorale/comm/lent_memory.h"
#include "chorale/device/collectives.h"
#include "chorale/device/stream.h"

namespace chorale::comm {

// What the ranks of a group know of their devices.
class GroupDevices {
 public:
  // Asks the others, and does not wait for the answer.
  GroupDevices(const std::shared_ptr<GroupState>& state, Device device, std::chrono::milliseconds timeout);
  ~GroupDevices();
  GroupDevices(const GroupDevices&) = delete;
  GroupDevices& operator=(const GroupDevices&) = delete;

  enum class Way { kHost, kShared, kBetween };
  // Waits for the others' answers when it is first called.
  Way way(const std::shared_ptr<GroupState>& state);

  Device device() const { return device_; }
  // The group's own: those of callers may wait for the result, and ranks that are threads do not wait for each other.
  Stream stream() const { return stream_; }
  LentMemory& lent() { return *lent_; }
  // Whether this call between devices is the first one, which is the same one on all ranks: it tells them where they
  // meet, and begins the communicator.
  bool take_beginning() { return !std::exchange(taken_, true); }
  DeviceCollectives::Id make_id();
  void begin(const Membership& who, const DeviceCollectives::Id& id);
  // Throws CallFailed where it could not be begun.
  DeviceComm& comm(const Membership& who);
  void abort() noexcept;

 private:
  void decide(const GroupState& state);
  void say_why_not(const GroupState& state) const;

  const Device device_;
  const Tensor row_;
  const std::weak_ptr<Engine> engine_;
  Work question_;
  bool answered_ = false, taken_ = false;
  Way way_ = Way::kHost;
  Stream stream_;
  std::unique_ptr<LentMemory> lent_;
  std::unique_ptr<DeviceComm> comm_;
  std::string trouble_;
};

// The device's part of a call while it is put together: where its chunks are, and what is told to the others.
class DeviceCall : public DevicePart {
 public:
  DeviceCall(const std::shared_ptr<GroupState>& state, const Operation& operation);
  ~DeviceCall() override;

  // Contiguous memory of the device, with what the tensor holds or for what it will hold.
  Chunk chunk_of(const Tensor& tensor, bool read, bool written);
  // The last that is done with the call: the engine gets a few bytes instead of the chunks.
  virtual void seal(Operation& operation) = 0;

 protected:
  // Makes the engine move `own` instead: one for everybody, or one for each rank.
  void tell(Operation& operation, std::span<const std::byte> own, size_t each);
  template <class T>
  T told_by(int rank) const;
  // Copies what came back to where it belongs, on the group's stream.
  void unpack() const;

  const std::shared_ptr<GroupDevices> devices_;
  const Membership who_;
  const CallKind kind_;
  const int root_;
  const Reduction reduction_;
  DType dtype_ = DType::kU8;

 private:
  std::vector<std::pair<Tensor, Tensor>> packed_;  // and where it belongs
  std::vector<Tensor> keep_;
  Tensor sent_, told_;  // what travels on the host
};

// Null where the call goes through the host. `operation` has its kind, reduction and dtype.
std::shared_ptr<DeviceCall> begin_device_call(const std::shared_ptr<GroupState>& state, const Operation& operation,
                                              const Tensor& first);

}  // namespace chorale::comm
