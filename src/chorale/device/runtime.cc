#include "chorale/device/runtime.h"

#include <array>
#include <atomic>
#include <mutex>

#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"
#include "chorale/device/program.h"

namespace chorale {
namespace {

// Runtimes stay until the process ends: threads of theirs may be running then.
std::array<std::atomic<Runtime*>, kDeviceTypes> runtimes{};

// Its module adds runtime and kernels. Where that fails, the next call tries again. (A std::once_flag hangs then under
// the thread sanitizer.)
void load_cuda() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!find_runtime(DeviceType::kCuda)) load_shared_object(kCudaObject);
}

[[noreturn]] void raise_no_programs(Stream stream) {
  throw StateError(concat("work on ", stream.device, " cannot be recorded"));
}

}  // namespace

void Runtime::synchronize(Device device, Deadline deadline) {
  for (const Stream& stream : streams()) {
    if (stream.device == device) record(stream)->synchronize(deadline);
  }
}
void Runtime::begin_recording(Stream stream) { raise_no_programs(stream); }
std::unique_ptr<ProgramState> Runtime::end_recording(Stream stream) { raise_no_programs(stream); }

Runtime* find_runtime(DeviceType type) { return runtimes[static_cast<size_t>(type)].load(std::memory_order_acquire); }

Runtime& runtime_of(Device device) {
  Runtime* runtime = find_runtime(device.type);
  if (!runtime && device.type == DeviceType::kCuda) [[unlikely]] {
    load_cuda();
    runtime = find_runtime(device.type);
  }
  CHORALE_CHECK_STATE(runtime, "there is no device ", device, ": nothing in this process drives devices of the kind ",
                      type_name(device.type), "; `chorale doctor` says which devices there are");
  CHORALE_CHECK(device.index < runtime->count(), "there is no device ", device, ": this process has ", runtime->count(),
                " of the kind ", type_name(device.type));
  return *runtime;
}

void add_runtime(DeviceType type, std::unique_ptr<Runtime> runtime) {
  Runtime* none = nullptr;
  CHORALE_CHECK_STATE(runtimes[static_cast<size_t>(type)].compare_exchange_strong(none, runtime.get()),
                      "devices of the kind ", type_name(type), " were added before");
  static_cast<void>(runtime.release());  // the table has it now, for ever
}

}  // namespace chorale
