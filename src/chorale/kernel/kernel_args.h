// What a kernel gets. Inputs and outputs are tensors of its device; outputs are allocated, except those of ops whose
// shapes depend on data, which the kernel makes itself.
#pragma once

#include <span>

#include "chorale/kernel/attrs.h"
#include "chorale/tensor/tensor.h"

namespace chorale::op {
struct OpDef;
}

namespace chorale::kernel {

struct Pointwise;

struct KernelArgs {
  std::span<const Tensor> in;  // an absent optional input is undefined
  std::span<Tensor> out;
  const Attrs& attrs;
  Stream stream;
  const Pointwise* pointwise = nullptr;  // what a pointwise row computes; null for all others
  const op::OpDef* row = nullptr;        // for a device that runs another device's kernels; kernels do not look at it
};

using Kernel = void (*)(const KernelArgs&);

}  // namespace chorale::kernel
