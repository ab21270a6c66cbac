#include "chorale/device/cuda/fault.h"

#include <atomic>
#include <mutex>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"

namespace chorale::cuda {
namespace {

std::atomic<ExplainFault> explain_fault{nullptr};

}  // namespace

Fault* fault_of(Device device) {
  static std::once_flag made[kMostDevices];
  static Fault* faults[kMostDevices];
  std::call_once(made[device.index], [&] {
    make_current(device);
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, sizeof(Fault), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
          "taking memory for errors of kernels");
    faults[device.index] = new (memory) Fault;
  });
  return faults[device.index];
}

void throw_fault(Device device) {
  Fault* const fault = fault_of(device);
  if (std::atomic_ref(fault->taken).load(std::memory_order_acquire) != 2) return;
  const Fault found = *fault;
  std::atomic_ref(fault->taken).store(0);
  const ExplainFault explain = explain_fault.load();
  throw InvalidArgument(explain ? explain(found) : concat("a kernel found ", found.value, " at ", found.at));
}

void set_explain_fault(ExplainFault explain) { explain_fault.store(explain); }

}  // namespace chorale::cuda
