#include "chorale/eager/cuda/through_host.h"

#include <atomic>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/device/cuda/compiler.h"
#include "chorale/op/kernels.h"
#include "chorale/op/table.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::eager {
namespace {

constexpr const char* kRowsThroughHost[] = {
#include "chorale/eager/cuda/rows_through_host.inc"
};

// A copy on the host with the same strides, on which what a row gives may depend.
Tensor laid_out_alike(const Tensor& x) {
  for (const int64_t stride : x.strides()) {
    if (stride < 0) return on_host(x);
  }
  Tensor copy = Tensor::empty_strided(x.sizes(), x.strides(), x.dtype());
  copy_between_devices(x, copy);
  return copy;
}

void say_once(const op::OpDef& row) {
  static auto* const said = new std::vector<std::atomic<bool>>(op::all_ops().size());
  if ((*said)[row.facts.number].exchange(true)) return;
  log_info(concat("[", row.name, "] has no kernel for GPUs yet: it runs on the host, between copies"));
}

}  // namespace

std::span<const char* const> rows_through_host() { return kRowsThroughHost; }

void run_through_host(const kernel::KernelArgs& args) {
  if (cuda::makes_ahead()) return;
  const op::OpDef& row = *args.row;
  say_once(row);
  SmallVector<Tensor, 8> in, out;
  for (const Tensor& x : args.in) in.push_back(x.defined() ? laid_out_alike(x) : x);
  for (const Tensor& y : args.out) {
    out.push_back(row.dynamic ? Tensor() : Tensor::empty_strided(y.sizes(), y.strides(), y.dtype()));
  }
  const kernel::Kernel kernel = op::find_kernel(row, DeviceType::kCpu);
  kernel({{in.data(), in.size()},
          {out.data(), out.size()},
          args.attrs,
          Stream{kCpu},
          row.pointwise ? &*row.pointwise : nullptr,
          &row});
  for (size_t i = 0; i < args.out.size(); ++i) {
    if (row.dynamic) args.out[i] = Tensor::empty(out[i].sizes(), out[i].dtype(), args.stream.device);
    copy_between_devices(out[i], args.out[i]);
  }
}

}  // namespace chorale::eager
