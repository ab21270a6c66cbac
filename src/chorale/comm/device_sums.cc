#include "chorale/comm/device_sums.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/device/peers.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::comm {
namespace {

constexpr size_t kLeastBytes = size_t{64} << 10;

// Memory of groups that are gone, each piece free from a moment on.
struct Retired {
  Device device;
  PeerHandle memory;
  Deadline::Clock::time_point free_at;
};
struct Retirement {
  std::mutex mutex;
  std::vector<Retired> pieces;
  std::vector<Stream> streams;  // those live as long as the process
};
Retirement& retirement() {
  static auto* const all = new Retirement;
  return *all;
}

Tensor seen_as(const PeerHandle& memory, const Tensor& like) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that travelled
  void* const data = reinterpret_cast<void*>(memory.address);
  return Tensor::on(Storage::wrap(data, memory.bytes, like.device()), like.sizes(), contiguous_strides(like.sizes()), 0,
                    like.dtype());
}

// A call of the host in which every rank tells the others some bytes: those of rank r are the r-th of a row, and zeros
// elsewhere, so that their sum has all of them.
template <class T>
Tensor row_with(const T& own, const GroupState& state) {
  Tensor row = Tensor::empty({static_cast<int64_t>(state.size()), static_cast<int64_t>(sizeof(T))}, DType::kU8);
  std::memset(row.raw(), 0, static_cast<size_t>(row.elems()));
  std::memcpy(static_cast<std::byte*>(row.raw()) + static_cast<size_t>(state.rank()) * sizeof(T), &own, sizeof(T));
  return row;
}
template <class T>
T bytes_of_rank(const Tensor& row, int rank) {
  T told;
  std::memcpy(&told, static_cast<const std::byte*>(row.raw()) + static_cast<size_t>(rank) * sizeof(T), sizeof(T));
  return told;
}

using Identity = std::array<std::byte, 16>;

}  // namespace

DeviceSums::DeviceSums(Device device, std::chrono::milliseconds timeout) : device_(device), timeout_(timeout) {
  Retirement& all = retirement();
  const std::lock_guard lock(all.mutex);
  const auto retired =
      std::find_if(all.streams.begin(), all.streams.end(), [&](const Stream& one) { return one.device == device; });
  if (retired == all.streams.end()) {
    stream_ = make_stream(device);
  } else {
    stream_ = *retired;
    all.streams.erase(retired);
  }
}

DeviceSums::~DeviceSums() {
  Retirement& all = retirement();
  const std::lock_guard lock(all.mutex);
  all.streams.push_back(stream_);
  const auto now = Deadline::Clock::now();
  for (const PeerHandle& memory : free_) all.pieces.push_back({device_, memory, now});
  for (const Lent& lent : lent_) all.pieces.push_back({device_, lent.memory, now + timeout_});
}

DeviceSums::Lent DeviceSums::lend(size_t bytes) {
  // Pieces have few sizes, so that one of a call fits the next.
  const size_t size = std::bit_ceil(std::max(bytes, kLeastBytes));
  const std::lock_guard lock(mutex_);
  Lent lent{{}, ++calls_};
  const auto own = std::find_if(free_.begin(), free_.end(), [&](const PeerHandle& m) { return m.bytes == size; });
  if (own != free_.end()) {
    lent.memory = *own;
    free_.erase(own);
  } else {
    Retirement& all = retirement();
    const std::lock_guard retired_lock(all.mutex);
    const auto now = Deadline::Clock::now();
    const auto retired = std::find_if(all.pieces.begin(), all.pieces.end(), [&](const Retired& one) {
      return one.device == device_ && one.free_at <= now && one.memory.bytes == size;
    });
    if (retired != all.pieces.end()) {
      lent.memory = retired->memory;
      all.pieces.erase(retired);
    } else {
      lent.memory = find_peer_memory(device_.type)->make(device_, size);
    }
  }
  lent_.push_back(lent);
  return lent;
}

void DeviceSums::note_done(const Lent& lent) {
  const std::lock_guard lock(mutex_);
  std::erase_if(lent_, [&](const Lent& one) {
    if (one.call >= lent.call) return false;
    free_.push_back(one.memory);
    return true;
  });
}

DeviceQuestion::DeviceQuestion(const std::shared_ptr<GroupState>& state, Device asked_for, const CallOptions& options)
    : device(asked_for), row(row_with(find_peer_memory(asked_for.type)->identity(asked_for), *state)) {
  Operations* const collecting = std::exchange(state->collecting, nullptr);  // this call is not one of a scope
  CallBuilder call(state, CallKind::kAllReduce, {.tag = 0, .timeout = options.timeout});
  call.set_reduction({}, DType::kU8);
  call.set_count(row.elems());
  call.operation().traced = false;
  call.operation().keep.push_back(row.storage());
  const Chunk chunk{static_cast<std::byte*>(row.raw()), static_cast<size_t>(row.elems())};
  call.give(chunk);
  call.take(chunk);
  work = call.launch();
  state->collecting = collecting;
}
bool DeviceQuestion::all_share_one(int ranks) const {
  work.wait();
  for (int r = 1; r < ranks; ++r) {
    if (bytes_of_rank<Identity>(row, r) != bytes_of_rank<Identity>(row, 0)) return false;
  }
  return true;
}

bool sums_on_device(const std::shared_ptr<GroupState>& state, const Tensor& tensor, Reduction reduction,
                    const CallOptions& options) {
  if (!tensor.defined() || tensor.device() == kCpu) [[likely]]
    return false;
  PeerMemory* const memory = find_peer_memory(tensor.device().type);
  // What follows is the same on all ranks, or the call is an error anyway.
  if (!memory || state->size() < 2 || static_cast<size_t>(state->size()) > PeerMemory::kMostSources ||
      tensor.elems() == 0 || !is_floating(tensor.dtype()) || tensor.is_sparse() || tensor.is_traced() ||
      (reduction.op != Reduce::kSum && reduction.op != Reduce::kAverage) ||
      std::string_view(state->engine->backend()) != "shm")
    return false;
  if (!state->device_question) {
    state->device_question = std::make_shared<DeviceQuestion>(state, tensor.device(), options);
    return false;
  }
  if (!state->device_sums && !state->device_question->answered) {
    state->device_question->answered = true;
    if (state->device_question->all_share_one(state->size()))
      state->device_sums = std::make_shared<DeviceSums>(state->device_question->device, state->timeout);
  }
  return state->device_sums && state->device_sums->device() == tensor.device();
}

Work all_reduce_on_device(const std::shared_ptr<GroupState>& state, const Tensor& tensor, Reduction reduction,
                          const CallOptions& options) {
  CallBuilder call(state, CallKind::kAllReduce, options);
  call.set_reduction(reduction, tensor.dtype());
  call.set_count(tensor.elems());
  call.written_elsewhere(tensor);
  const std::shared_ptr<DeviceSums> sums = state->device_sums;
  const size_t bytes = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
  const DeviceSums::Lent lent = sums->lend(bytes);
  copy_between_devices(tensor, seen_as(lent.memory, tensor));
  synchronize(current_stream(tensor.device()));  // of this rank's own work: no other rank is waited for

  // To the engine it is a sum of bytes.
  const Tensor row = row_with(lent.memory, *state);
  Operation& operation = call.operation();
  operation.print.variant |= kOnDevice;
  operation.dtype = DType::kU8;
  operation.reduction = Reduction{Reduce::kSum};
  operation.keep.push_back(row.storage());
  const Chunk chunk{static_cast<std::byte*>(row.raw()), static_cast<size_t>(row.elems())};
  call.give(chunk);
  call.take(chunk);
  const int size = state->size();
  operation.finish.push_back([sums, lent, row, tensor, reduction, size] {
    const Device device = tensor.device();
    PeerMemory& memory = *find_peer_memory(device.type);
    std::vector<const void*> sources;
    sources.reserve(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) sources.push_back(memory.open(device, bytes_of_rank<PeerHandle>(row, r)));
    const Stream stream = sums->stream();
    const StreamScope scope(stream);
    const Tensor out = tensor.is_contiguous() ? tensor : Tensor::empty(tensor.sizes(), tensor.dtype(), device);
    memory.sum(sources, tensor.dtype(), reduction.factor, reduction.op == Reduce::kAverage ? size : 1, out.raw(),
               tensor.elems(), stream);
    if (!out.is(tensor)) copy_between_devices(out, tensor);
    synchronize(stream);
    sums->note_done(lent);
  });
  return call.launch();
}

}  // namespace chorale::comm
