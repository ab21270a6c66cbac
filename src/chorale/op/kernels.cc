#include "chorale/op/kernels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/stream.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

using kernel::Kernel;
using kernel::KernelArgs;

void nothing(const KernelArgs&) {}

// Indexed by device and by the row's number. A table that was replaced is kept until the process ends: launches on
// other threads may be reading it.
constinit std::array<std::atomic<const Kernel*>, kDeviceTypes> tables{};

void set_table(DeviceType device, const std::vector<Kernel>& kernels) {
  auto* const table = new Kernel[kernels.size()];
  std::copy(kernels.begin(), kernels.end(), table);
  tables[static_cast<size_t>(device)].store(table, std::memory_order_release);
}

// The CPU's and the null device's, when the first kernel is asked for: rows have their numbers then.
void fill_own_tables() {
  static const bool once = [] {
    std::vector<Kernel> cpu, none;
    for (const OpDef* row : all_ops()) {
      cpu.push_back(row->view && !row->cpu ? nothing : row->cpu);
      none.push_back(nothing);
    }
    set_table(DeviceType::kCpu, cpu);
    set_table(DeviceType::kNull, none);
    return true;
  }();
  static_cast<void>(once);
}

inline Kernel find(const OpDef& op, DeviceType device) {
  auto& table = tables[static_cast<size_t>(device)];
  const Kernel* kernels = table.load(std::memory_order_acquire);
  if (!kernels) [[unlikely]] {
    fill_own_tables();
    kernels = table.load(std::memory_order_acquire);
  }
  return kernels ? kernels[op.facts.number] : nullptr;
}

[[noreturn]] void raise_missing(const OpDef& op, Device device) {
  throw StateError(concat("[", op.name, "] has no kernel for ", device, "; `chorale ops ", op.name,
                          "` shows the devices that have one"));
}

}  // namespace

void add_kernels(DeviceType device, std::span<const NamedKernel> kernels) {
  std::vector<Kernel> added;
  for (const OpDef* row : all_ops()) added.push_back(row->view ? nothing : nullptr);
  for (const NamedKernel& named : kernels) {
    const OpDef* row = find_op(named.op);
    CHORALE_CHECK(row, "[add_kernels] there is no op '", named.op, "'");
    added[row->facts.number] = named.kernel;
  }
  set_table(device, added);
}

Kernel find_kernel(const OpDef& op, DeviceType device) { return find(op, device); }

void launch(const OpDef& op, Device device, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) {
  const Kernel kernel = find(op, device.type);
  if (!kernel) [[unlikely]]
    raise_missing(op, device);
  const Stream stream = device == kCpu ? Stream{device} : current_stream(device);
  kernel({in, out, attrs, stream, op.pointwise ? &*op.pointwise : nullptr, &op});
}

}  // namespace chorale::op
