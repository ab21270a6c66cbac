#include "chorale/device/sim/sim_device.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <map>
#include <mutex>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/program.h"
#include "chorale/device/sim/sim_memory.h"
#include "chorale/device/sim/sim_stream.h"
#include "chorale/device/stream.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::sim {
namespace {

constexpr size_t kPinnedBytes = size_t{1} << 32;
constexpr int kMostDevices = 8;

SimStream& stream_of(Stream stream) { return *static_cast<SimStream*>(stream.handle); }

// Sizes and strides of a view, which must outlive the call that names them.
class KeptView {
 public:
  explicit KeptView(const vec::StridedView& view)
      : view_(view), sizes_(view.sizes.begin(), view.sizes.end()), strides_(view.strides.begin(), view.strides.end()) {}
  vec::StridedView at(void* data) const { return {data, view_.dtype, sizes_, strides_}; }
  void* data() const { return view_.data; }
  // The bytes from the first to the last element.
  std::pair<const std::byte*, size_t> reach() const {
    const auto elem = static_cast<int64_t>(size_of(view_.dtype));
    int64_t low = 0, high = 1;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      if (sizes_[d] == 0) return {static_cast<const std::byte*>(view_.data), 0};
      (strides_[d] < 0 ? low : high) += (sizes_[d] - 1) * strides_[d];
    }
    return {static_cast<const std::byte*>(view_.data) + low * elem, static_cast<size_t>((high - low) * elem)};
  }

 private:
  vec::StridedView view_;
  std::vector<int64_t> sizes_, strides_;
};

struct SimDevice {
  SimMemory* memory;  // the allocator's
  std::unique_ptr<StreamAllocator> allocator;
  Stream default_stream;
};

class RecordedTasks final : public ProgramState {
 public:
  RecordedTasks(std::vector<SimStream::Task> tasks, StreamAllocator& allocator, uint64_t keeper)
      : tasks_(std::move(tasks)), allocator_(allocator), keeper_(keeper) {}
  ~RecordedTasks() override {
    try {
      if (last_run_) last_run_->synchronize(Deadline::never());
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the next wait for the stream says so
    }
    allocator_.release_kept(keeper_);
  }
  RecordedTasks(const RecordedTasks&) = delete;
  RecordedTasks& operator=(const RecordedTasks&) = delete;
  void run(Stream stream) override {
    for (const SimStream::Task& task : tasks_) stream_of(stream).put(task);
    last_run_ = stream_of(stream).record();
  }

 private:
  std::vector<SimStream::Task> tasks_;
  StreamAllocator& allocator_;
  const uint64_t keeper_;  // Note [Memory of programs]
  std::shared_ptr<Event::State> last_run_;
};

class SimGate final : public StreamGate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
    if (error_) std::rethrow_exception(error_);
  }
  void open(std::exception_ptr error) override {
    const std::lock_guard lock(mutex_);
    open_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  std::exception_ptr error_;
};

class SimRuntime final : public Runtime {
 public:
  explicit SimRuntime(const Options& options) : options_(options) {
    CHORALE_CHECK(options.devices >= 1 && options.devices <= kMostDevices, "1 to ", kMostDevices,
                  " devices can be simulated, not ", options.devices);
    for (int16_t i = 0; i < options.devices; ++i) {
      const Device device{DeviceType::kSim, i};
      auto memory = std::make_unique<SimMemory>(options.bytes, /*closed=*/true);
      SimMemory* const kept = memory.get();
      devices_.push_back({kept, std::make_unique<StreamAllocator>(device, std::move(memory), memory::kPageBytes), {}});
      devices_.back().default_stream = make_stream(device);
    }
    auto memory = std::make_unique<SimMemory>(kPinnedBytes, /*closed=*/false);
    pinned_memory_ = memory.get();
    // Its next user is the host, which is ordered by no stream: copies say on which streams they use it.
    pinned_ = std::make_unique<StreamAllocator>(kCpu, std::move(memory), memory::kPageBytes);
  }

  int count() const override { return options_.devices; }
  Allocator& allocator(Device device) override { return *at(device).allocator; }
  Allocator* pinned() override { return pinned_.get(); }
  Stream default_stream(Device device) override { return at(device).default_stream; }

  Stream make_stream(Device device) override {
    const std::lock_guard lock(mutex_);
    auto* const made = new SimStream(options_.seed + streams_.size(), options_.most_delay);  // its thread never ends
    streams_.push_back({device, made});
    return streams_.back();
  }
  std::shared_ptr<Event::State> record(Stream stream) override { return stream_of(stream).record(); }
  void wait(Stream stream, const std::shared_ptr<Event::State>& event) override { stream_of(stream).wait(event); }
  std::shared_ptr<StreamGate> hold(Stream stream) override {
    auto gate = std::make_shared<SimGate>();
    stream_of(stream).put([gate] { gate->pass(); });
    return gate;
  }
  std::vector<Stream> streams() override {
    const std::lock_guard lock(mutex_);
    return streams_;
  }
  void begin_recording(Stream stream) override {
    stream_of(stream).begin_recording();
    const std::lock_guard lock(mutex_);
    keepers_[stream.handle] = at(stream.device).allocator->begin_keeping(stream);
  }
  std::unique_ptr<ProgramState> end_recording(Stream stream) override {
    StreamAllocator& allocator = *at(stream.device).allocator;
    allocator.end_keeping(stream);
    const std::lock_guard lock(mutex_);
    return std::make_unique<RecordedTasks>(stream_of(stream).end_recording(), allocator, keepers_[stream.handle]);
  }

  void copy(const vec::StridedView& from, Device, const vec::StridedView& to, Device, Stream stream) override {
    const KeptView source(from), target(to);
    const auto source_bytes = source.reach(), target_bytes = target.reach();
    // The host must not touch pinned memory before the copy is done.
    const auto pinned = [&](const auto& reach) { return pinned_memory_->holds(reach.first); };
    for (const auto& reach : {source_bytes, target_bytes}) {
      if (!pinned(reach)) continue;
      pinned_->record_stream(reach.first, stream);
      pinned_memory_->close(reach.first, reach.second);
    }
    stream_of(stream).put([=, this] {
      vec::copy_strided(source.at(open(source.data())), target.at(open(target.data())), vec::Threads::kOne);
      for (const auto& reach : {source_bytes, target_bytes}) {
        if (pinned(reach)) pinned_memory_->reopen(reach.first, reach.second);
      }
    });
    const auto is_plain = [&](const void* address) { return open(address) == address; };
    if (is_plain(from.data) || is_plain(to.data)) record(stream)->synchronize(Deadline::never());
  }
  void fill(const void* value, const vec::StridedView& to, Stream stream) override {
    const KeptView target(to);
    std::array<std::byte, 16> bytes{};
    std::copy_n(static_cast<const std::byte*>(value), size_of(to.dtype), bytes.begin());
    stream_of(stream).put(
        [=, this] { vec::fill_strided(bytes.data(), target.at(open(target.data())), vec::Threads::kOne); });
  }

  // Where stream threads see it.
  void* open(const void* address) const {
    for (const SimDevice& device : devices_) {
      if (device.memory->holds(address)) return device.memory->open(address);
    }
    return pinned_memory_->holds(address) ? pinned_memory_->open(address) : const_cast<void*>(address);
  }
  StreamAllocator& stream_allocator(Device device) { return *at(device).allocator; }

  // What a faulting address belongs to; empty when it is none of ours.
  std::string explain(const void* address) const {
    for (size_t i = 0; i < devices_.size(); ++i) {
      if (!devices_[i].memory->holds(address)) continue;
      return concat("the host touched memory of sim:", i, ": ", devices_[i].allocator->label_of(address),
                    "; copy the tensor to the CPU first (to(x, kCpu)), or read it with item() or to_vector()\n");
    }
    if (!pinned_memory_->holds(address)) return {};
    return "the host touched pinned memory while a copy reads or writes it; wait for the copy first (synchronize)\n";
  }

 private:
  SimDevice& at(Device device) { return devices_[static_cast<size_t>(device.index)]; }

  const Options options_;
  std::vector<SimDevice> devices_;
  SimMemory* pinned_memory_ = nullptr;  // the allocator's
  std::unique_ptr<StreamAllocator> pinned_;
  std::mutex mutex_;  // guards what follows
  std::vector<Stream> streams_;
  std::map<void*, uint64_t> keepers_;  // of streams that are or were recorded
};

std::atomic<SimRuntime*> the_runtime{nullptr};
struct sigaction earlier_handler;

// Says whose memory it was, and leaves the fault to the handler that was there before.
void explain_fault(int number, siginfo_t* info, void* context) {
  if (const SimRuntime* runtime = the_runtime.load()) {
    const std::string message = runtime->explain(info->si_addr);
    if (!message.empty() && ::write(STDERR_FILENO, message.data(), message.size()) < 0) return;
  }
  if (earlier_handler.sa_flags & SA_SIGINFO) return earlier_handler.sa_sigaction(number, info, context);
  ::sigaction(number, &earlier_handler, nullptr);  // the access is tried again, and ends the process
}

SimRuntime& runtime() {
  SimRuntime* const runtime = the_runtime.load();
  CHORALE_CHECK_STATE(runtime, "no device is simulated: call sim::add_device() first");
  return *runtime;
}

}  // namespace

void add_device(const Options& options) {
  static std::once_flag once;
  std::call_once(once, [&] {
    auto made = std::make_unique<SimRuntime>(options);
    SimRuntime* const kept = made.get();
    add_runtime(DeviceType::kSim, std::move(made));
    the_runtime.store(kept);
    struct sigaction handler {};
    handler.sa_sigaction = explain_fault;
    handler.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    ::sigaction(SIGSEGV, &handler, &earlier_handler);
  });
}

void put(Stream stream, std::function<void()> task) { stream_of(stream).put(std::move(task)); }
void* open(const void* address) { return runtime().open(address); }
void set_label(Device device, const void* address, std::string label) {
  runtime().stream_allocator(device).set_label(address, std::move(label));
}
void hold(Stream stream) { stream_of(stream).hold(); }
void go_on(Stream stream) { stream_of(stream).go_on(); }
void plant_early_reuse(Device device, bool planted) { runtime().stream_allocator(device).plant_early_reuse(planted); }

}  // namespace chorale::sim
