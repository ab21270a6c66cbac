#include "chorale/device/cuda/cuda_runtime.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/cuda_memory.h"
#include "chorale/device/cuda/fault.h"
#include "chorale/device/cuda/recorded_fills.h"
#include "chorale/device/cuda/space.h"
#include "chorale/device/program.h"
#include "chorale/device/stream.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::cuda {
namespace {

constexpr size_t kBlockUnitBytes = 512;

CUstream handle_of(Stream stream) { return static_cast<CUstream>(stream.handle); }

class CudaEvent final : public Event::State {
 public:
  explicit CudaEvent(Stream stream) : device_(stream.device) {
    make_current(device_);
    check(driver().cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "making an event");
    record(stream);
  }
  void record(Stream stream) { check(driver().cuEventRecord(event_, handle_of(stream)), "recording an event"); }
  ~CudaEvent() override { driver().cuEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() const override {
    make_current(device_);
    const CUresult result = driver().cuEventQuery(event_);
    if (result == CUDA_ERROR_NOT_READY || result == CUDA_ERROR_CAPTURED_EVENT) return false;
    check(result, "looking at an event");
    return true;
  }
  void synchronize(Deadline deadline) override {
    make_current(device_);
    if (deadline.end() == Deadline::never().end()) {
      check(driver().cuEventSynchronize(event_), "waiting for the device");
    } else {
      // Most waits are short: a thread that slept at once would wake long after the end.
      constexpr auto kAwake = std::chrono::microseconds(300);
      const auto begun = std::chrono::steady_clock::now();
      while (!done()) {
        CHORALE_CHECK_STATE(!deadline.passed(), "work on ", device_, " has not ended by the deadline");
        if (std::chrono::steady_clock::now() - begun < kAwake) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      }
    }
    throw_fault(device_);
  }
  CUevent handle() const { return event_; }

 private:
  const Device device_;
  CUevent event_ = nullptr;
};

class CudaProgram final : public ProgramState {
 public:
  CudaProgram(CUgraph graph, StreamAllocator& allocator, uint64_t keeper) : allocator_(allocator), keeper_(keeper) {
    const CUresult result = driver().cuGraphInstantiateWithFlags(&program_, graph, 0);
    driver().cuGraphDestroy(graph);
    check(result, "preparing a program");
  }
  ~CudaProgram() override {
    // A run may still be on a stream: its memory goes to others when it has ended.
    try {
      if (last_run_) last_run_->synchronize(Deadline::never());
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the device is lost; the next wait for it says so
    }
    driver().cuGraphExecDestroy(program_);
    allocator_.release_kept(keeper_);
  }
  CudaProgram(const CudaProgram&) = delete;
  CudaProgram& operator=(const CudaProgram&) = delete;
  void run(Stream stream) override {
    make_current(stream.device);
    check(driver().cuGraphLaunch(program_, handle_of(stream)), "running a program");
    if (last_run_) {
      last_run_->record(stream);
    } else {
      last_run_ = std::make_unique<CudaEvent>(stream);
    }
  }

 private:
  StreamAllocator& allocator_;
  const uint64_t keeper_;  // Note [Memory of programs]
  CUgraphExec program_ = nullptr;
  std::unique_ptr<CudaEvent> last_run_;
};

// The bytes from the first to the last element.
std::pair<std::byte*, size_t> reach_of(const vec::StridedView& view) {
  const auto elem = static_cast<int64_t>(size_of(view.dtype));
  int64_t low = 0, high = 1;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    (view.strides[d] < 0 ? low : high) += (view.sizes[d] - 1) * view.strides[d];
  }
  return {static_cast<std::byte*>(view.data) + low * elem, static_cast<size_t>((high - low) * elem)};
}

int64_t elems_of(const vec::StridedView& view) {
  int64_t elems = 1;
  for (const int64_t size : view.sizes) elems *= size;
  return elems;
}

// Both lie in memory alike and without holes: their bytes can be copied as they are.
bool same_layout(const vec::StridedView& a, const vec::StridedView& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return reach_of(a).second == static_cast<size_t>(elems_of(a)) * size_of(a.dtype);
}

std::vector<int64_t> row_major(std::span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= sizes[d]) strides[d] = step;
  return strides;
}

struct CudaDevice {
  std::unique_ptr<StreamAllocator> allocator;
  Stream default_stream;
};

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime() {
    const auto count = static_cast<int16_t>(device_count());
    for (int16_t i = 0; i < count; ++i) {
      const Device device{DeviceType::kCuda, i};
      devices_.push_back({nullptr, {}});
      devices_.back().default_stream = make_stream(device);
      devices_.back().allocator = std::make_unique<StreamAllocator>(device, device_memory(device), kBlockUnitBytes);
      fault_of(device);
    }
  }

  int count() const override { return static_cast<int>(devices_.size()); }
  Allocator& allocator(Device device) override { return *at(device).allocator; }
  Allocator* pinned() override { return &pinned_; }
  Stream default_stream(Device device) override { return at(device).default_stream; }
  Stream make_stream(Device device) override {
    make_current(device);
    CUstream stream = nullptr;
    check(driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "making a stream");
    const std::lock_guard lock(mutex_);
    return streams_.emplace_back(Stream{device, stream});
  }
  std::shared_ptr<Event::State> record(Stream stream) override { return std::make_shared<CudaEvent>(stream); }
  void wait(Stream stream, const std::shared_ptr<Event::State>& event) override {
    make_current(stream.device);
    if (const auto* const ours = dynamic_cast<const CudaEvent*>(event.get())) {
      check(driver().cuStreamWaitEvent(handle_of(stream), ours->handle(), 0), "waiting for an event");
    } else {
      event->synchronize(Deadline::never());  // of another kind of device
    }
  }
  std::vector<Stream> streams() override {
    const std::lock_guard lock(mutex_);
    return streams_;
  }
  void begin_recording(Stream stream) override {
    make_current(stream.device);
    // Relaxed: memory may be mapped meanwhile, and kernels loaded.
    check(driver().cuStreamBeginCapture(handle_of(stream), CU_STREAM_CAPTURE_MODE_RELAXED), "beginning to record");
    const std::lock_guard lock(mutex_);
    keepers_[stream.handle] = at(stream.device).allocator->begin_keeping(stream);
  }
  std::unique_ptr<ProgramState> end_recording(Stream stream) override {
    make_current(stream.device);
    StreamAllocator& allocator = *at(stream.device).allocator;
    uint64_t keeper = 0;
    {
      const std::lock_guard lock(mutex_);
      keeper = std::exchange(keepers_[stream.handle], 0);
    }
    allocator.end_keeping(stream);
    CUgraph graph = nullptr;
    try {
      check(driver().cuStreamEndCapture(handle_of(stream), &graph), "ending a recording");
      fill_by_kernels(graph, stream.device);
    } catch (...) {
      if (graph) driver().cuGraphDestroy(graph);
      allocator.release_kept(keeper);
      throw;
    }
    return std::make_unique<CudaProgram>(graph, allocator, keeper);
  }

  void copy(const vec::StridedView& from, Device from_device, const vec::StridedView& to, Device to_device,
            Stream stream) override {
    if (elems_of(from) == 0 || makes_ahead()) return;
    make_current(stream.device);
    if (same_layout(from, to))
      return copy_bytes(reach_of(from).first, from_device, reach_of(to).first, to_device, reach_of(from).second,
                        stream);
    if (from_device.type == DeviceType::kCuda && to_device.type == DeviceType::kCuda) {
      return copy_on_device(from, to, stream);
    }
    // One side is the host: strides are undone there and done on the device, or the other way round.
    const std::vector<int64_t> strides = row_major(from.sizes);
    const size_t bytes = static_cast<size_t>(elems_of(from)) * size_of(from.dtype);
    const bool to_the_device = from_device == kCpu;
    const Device device = to_the_device ? to_device : from_device;
    const memory::Block there = allocator(device).allocate(bytes), here = pinned_.allocate(bytes);
    const vec::StridedView device_side{there.data, from.dtype, from.sizes, strides};
    const vec::StridedView host_side{here.data, from.dtype, from.sizes, strides};
    if (to_the_device) {
      vec::copy_strided(from, host_side, vec::Threads::kOne);
      copy_bytes(here.data, kCpu, there.data, device, bytes, stream);
      copy_on_device(device_side, to, stream);
    } else {
      copy_on_device(from, device_side, stream);
      copy_bytes(there.data, device, here.data, kCpu, bytes, stream);
      record(stream)->synchronize(Deadline::never());
      vec::copy_strided(host_side, to, vec::Threads::kOne);
    }
    allocator(device).deallocate(there);
    pinned_.deallocate(here);
  }

  void fill(const void* value, const vec::StridedView& to, Stream stream) override {
    if (elems_of(to) == 0) return;
    const size_t bytes = size_of(to.dtype);
    std::array<std::byte, 16> element{};
    std::memcpy(element.data(), value, bytes);
    const auto [first, all] = reach_of(to);
    if (all == static_cast<size_t>(elems_of(to)) * bytes && element == std::array<std::byte, 16>{}) {
      if (makes_ahead()) return;
      make_current(stream.device);
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(first), 0, all, handle_of(stream)), "filling");
      return;
    }
    const Space space(vec::StridedSpace(to, {}), 1);
    launch(prelude_kernel(stream.device, concat("fill_space<", unit_in_text(bytes), ">")),
           {.x = blocks_for(stream.device, space.elems)}, stream, space, element);
  }

 private:
  CudaDevice& at(Device device) { return devices_[static_cast<size_t>(device.index)]; }

  void copy_bytes(const void* from, Device from_device, void* to, Device to_device, size_t bytes, Stream stream) {
    CUstreamCaptureStatus recorded = CU_STREAM_CAPTURE_STATUS_NONE;
    if (from_device.type != DeviceType::kCuda || to_device.type != DeviceType::kCuda)
      check(driver().cuStreamIsCapturing(handle_of(stream), &recorded), "copying");
    CHORALE_CHECK_STATE(recorded == CU_STREAM_CAPTURE_STATUS_NONE,
                        "[recording] a copy between host and device cannot be recorded, since the host's memory may be "
                        "another one when it is run again (random numbers, item(), tensors made of numbers); do it "
                        "outside of what is recorded");
    bool waits = false;
    for (const auto& [address, device] : {std::pair<const void*, Device>{from, from_device}, {to, to_device}}) {
      if (device.type == DeviceType::kCuda) continue;
      if (pinned_.holds(address)) {
        pinned_.record_stream(address, stream);
      } else {
        waits = true;
      }
    }
    check(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes,
                                 handle_of(stream)),
          "copying");
    if (waits) record(stream)->synchronize(Deadline::never());
  }

  static void copy_on_device(const vec::StridedView& from, const vec::StridedView& to, Stream stream) {
    Space space(vec::StridedSpace(to, {&from, 1}), 2);
    const size_t unit = widen_units(space, 2, size_of(from.dtype));
    launch(prelude_kernel(stream.device, concat("copy_space<", unit_in_text(unit), ">")),
           {.x = blocks_for(stream.device, space.elems)}, stream, space);
  }

  std::vector<CudaDevice> devices_;
  PinnedAllocator pinned_;
  std::mutex mutex_;  // guards what follows
  std::vector<Stream> streams_;
  std::map<void*, uint64_t> keepers_;  // of streams that are recorded
};

}  // namespace

std::unique_ptr<Runtime> make_runtime() {
  CHORALE_CHECK_STATE(device_count() > 0, "[cuda] NVIDIA's driver is here, but it finds no GPU; nvidia-smi says more");
  return std::make_unique<CudaRuntime>();
}

}  // namespace chorale::cuda
