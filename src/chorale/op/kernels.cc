#include "chorale/op/kernels.h"

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/stream.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

using kernel::Kernel;
using kernel::KernelArgs;

void nothing(const KernelArgs&) {}

using Kernels = std::vector<Kernel>;

// Made when the first kernel is asked for: rows have their numbers then.
class KernelTables {
 public:
  KernelTables() {
    Kernels cpu, none;
    for (const OpDef* row : all_ops()) {
      cpu.push_back(row->view && !row->cpu ? nothing : row->cpu);
      none.push_back(nothing);
    }
    set(DeviceType::kCpu, std::move(cpu));
    set(DeviceType::kNull, std::move(none));
  }

  Kernel find(const OpDef& op, DeviceType device) const {
    const Kernels* kernels = tables_[static_cast<size_t>(device)].load(std::memory_order_acquire);
    return kernels ? (*kernels)[op.facts.number] : nullptr;
  }
  void set(DeviceType device, Kernels kernels) {
    // Launches on other threads may be reading the old one: it is kept, as the table is, until the process ends.
    tables_[static_cast<size_t>(device)].store(new Kernels(std::move(kernels)), std::memory_order_release);
  }

 private:
  std::array<std::atomic<const Kernels*>, kDeviceTypes> tables_{};
};

KernelTables& tables() {
  static auto* const tables = new KernelTables;
  return *tables;
}

[[noreturn]] void raise_missing(const OpDef& op, Device device) {
  throw StateError(concat("[", op.name, "] has no kernel for ", device, "; `chorale ops ", op.name,
                          "` shows the devices that have one"));
}

}  // namespace

void add_kernels(DeviceType device, std::span<const NamedKernel> kernels) {
  Kernels added;
  for (const OpDef* row : all_ops()) added.push_back(row->view ? nothing : nullptr);
  for (const NamedKernel& named : kernels) {
    const OpDef* row = find_op(named.op);
    CHORALE_CHECK(row, "[add_kernels] there is no op '", named.op, "'");
    added[row->facts.number] = named.kernel;
  }
  tables().set(device, std::move(added));
}

Kernel find_kernel(const OpDef& op, DeviceType device) { return tables().find(op, device); }

void launch(const OpDef& op, Device device, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) {
  const Kernel kernel = tables().find(op, device.type);
  if (!kernel) [[unlikely]]
    raise_missing(op, device);
  kernel({in, out, attrs, current_stream(device), op.pointwise ? &*op.pointwise : nullptr, &op});
}

}  // namespace chorale::op
