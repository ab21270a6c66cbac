#include "chorale/device/cuda/cuda_memory.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"

namespace chorale::cuda {
namespace {

// Pages are taken so many at a time: mapping costs tens of microseconds.
constexpr size_t kGrowBytes = size_t{64} << 20;
constexpr size_t kLeastPinnedBytes = 512;

class DeviceMemory final : public GrowingMemory {
 public:
  explicit DeviceMemory(Device device) : device_(device) {
    make_current(device);
    property_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property_.location.id = facts_of(device).number;
    size_t granularity = 0;
    check(driver().cuMemGetAllocationGranularity(&granularity, &property_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "asking for the size of pages");
    step_ = std::max(kGrowBytes, granularity);
    // Blocks of several streams lie apart, so there may be more addresses in use than memory.
    reserved_ = (2 * facts_of(device).bytes + step_ - 1) / step_ * step_;
    CUdeviceptr address = 0;
    check(driver().cuMemAddressReserve(&address, reserved_, 0, 0, 0), "reserving addresses");
    base_ = reinterpret_cast<std::byte*>(address);
  }

  std::byte* base() const override { return base_; }
  void grow(size_t bytes) override {
    if (bytes <= mapped_) return;
    make_current(device_);
    const size_t wanted = (bytes - mapped_ + step_ - 1) / step_ * step_;
    CHORALE_CHECK_STATE(mapped_ + wanted <= reserved_, out_of_memory(bytes));
    CUmemGenericAllocationHandle pages = 0;
    const CUresult result = driver().cuMemCreate(&pages, wanted, &property_, 0);
    CHORALE_CHECK_STATE(result != CUDA_ERROR_OUT_OF_MEMORY, out_of_memory(bytes));
    check(result, "taking memory");
    const auto at = reinterpret_cast<CUdeviceptr>(base_ + mapped_);
    check(driver().cuMemMap(at, wanted, 0, pages, 0), "mapping memory");
    CUmemAccessDesc access{};
    access.location = property_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(driver().cuMemSetAccess(at, wanted, &access, 1), "opening memory");
    mapped_ += wanted;
  }

 private:
  std::string out_of_memory(size_t bytes) const {
    size_t free = 0, total = 0;
    driver().cuMemGetInfo(&free, &total);
    constexpr size_t kMiB = size_t{1} << 20;
    return concat("out of memory on ", device_, " (", facts_of(device_).name, "): ", (bytes - mapped_) / kMiB,
                  " MiB more were asked for; this process holds ", mapped_ / kMiB, " MiB, others and the driver ",
                  (total - free) / kMiB - std::min((total - free), mapped_) / kMiB, " MiB, ", free / kMiB, " of ",
                  total / kMiB, " MiB are free; try a smaller batch, bf16, or end what else uses the device");
  }

  const Device device_;
  CUmemAllocationProp property_{};
  std::byte* base_ = nullptr;
  size_t step_ = 0, reserved_ = 0, mapped_ = 0;
};

}  // namespace

std::unique_ptr<GrowingMemory> device_memory(Device device) { return std::make_unique<DeviceMemory>(device); }

memory::Block PinnedAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {};
  CHORALE_CHECK(bytes < size_t{1} << 47, "[allocate] ", bytes, " bytes are more than any machine has");
  const size_t rounded = std::bit_ceil(std::max(bytes, kLeastPinnedBytes));
  const std::lock_guard lock(mutex_);
  std::vector<Free>& free = free_[rounded];
  std::byte* data = nullptr;
  for (auto at = free.begin(); at != free.end() && !data; ++at) {
    std::erase_if(at->awaited, [](const auto& event) { return event->done(); });
    if (!at->awaited.empty()) continue;
    data = at->data;
    free.erase(at);
    break;
  }
  if (!data) {
    make_current({DeviceType::kCuda, 0});
    void* taken = nullptr;
    check(driver().cuMemHostAlloc(&taken, rounded, CU_MEMHOSTALLOC_PORTABLE), "taking pinned memory");
    data = static_cast<std::byte*>(taken);
    stats_.reserved_bytes += rounded;
  }
  live_.emplace(data, Live{rounded, {}});
  stats_.current_bytes += rounded;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
  return {data, rounded, nullptr};
}

void PinnedAllocator::deallocate(const memory::Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(block.data);
  if (found == live_.end()) return;
  Free run{block.data, {}};
  try {
    for (const Stream& stream : found->second.streams) run.awaited.push_back(runtime_of(stream.device).record(stream));
  } catch (const Error&) {
    return;  // the device is lost: whether a copy still reads the block cannot be known, so it is not used again
  }
  stats_.current_bytes -= found->second.bytes;
  free_[found->second.bytes].push_back(std::move(run));
  live_.erase(found);
}

MemoryStats PinnedAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}
void PinnedAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.current_bytes;
}

void PinnedAllocator::record_stream(const void* address, Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const std::byte*>(address);
  auto found = live_.upper_bound(at);
  if (found == live_.begin()) return;
  --found;
  std::vector<Stream>& streams = found->second.streams;
  if (at < found->first + found->second.bytes && std::find(streams.begin(), streams.end(), stream) == streams.end())
    streams.push_back(stream);
}

bool PinnedAllocator::holds(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const std::byte*>(address);
  const auto found = live_.upper_bound(at);
  if (found == live_.begin()) return false;
  const auto& [data, live] = *std::prev(found);
  return at < data + live.bytes;
}

}  // namespace chorale::cuda
