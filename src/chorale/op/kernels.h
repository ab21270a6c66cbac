// Kernels by device: a table per kind of device, with a place for each row, found by the row's number. The CPU's is
// made of what rows name themselves; that of another device is added by the module that brings the device, when it is
// loaded. So a row names no symbol of a device that a build lacks, and launching is one look-up.
#pragma once

#include <span>

#include "chorale/op/op_def.h"

namespace chorale::op {

struct NamedKernel {
  const char* op;  // the row's name
  kernel::Kernel kernel;
};
// Gives a kind of device its kernels: rows that are not listed have none there. Views need none. Called once per kind,
// before its first tensor; throws InvalidArgument for a name that no row has.
void add_kernels(DeviceType device, std::span<const NamedKernel> kernels);

// Null where there is none.
kernel::Kernel find_kernel(const OpDef& op, DeviceType device);

// Runs the row's kernel for `device`, which does nothing for a view and on the null device. Throws StateError, saying
// what there is, where the row has no kernel.
void launch(const OpDef& op, Device device, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out);

}  // namespace chorale::op
