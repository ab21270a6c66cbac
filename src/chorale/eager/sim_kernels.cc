#include "chorale/eager/sim_kernels.h"

#include <memory>
#include <mutex>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/stream.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/kernels.h"
#include "chorale/op/table.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::eager {
namespace {

using kernel::KernelArgs;

// The tensor as stream threads see it: a tensor of the CPU on the open mapping. It does not keep the memory: that is
// freed in the order of the stream (Note [Memory in the order of streams]).
Tensor seen_by_stream(const Tensor& x) {
  if (!x.defined()) return x;
  const base::Intrusive<Storage>& storage = x.storage();
  void* const bytes = storage->bytes() > 0 ? sim::open(storage->data()) : nullptr;
  return Tensor::on(Storage::wrap(bytes, storage->bytes(), kCpu), x.sizes(), x.strides(), x.offset(), x.dtype());
}

struct Call {
  const op::OpDef& row;
  Attrs attrs;
  Tensors in, out;
};

void run_now(Call& call) {
  const kernel::Kernel kernel = op::find_kernel(call.row, DeviceType::kCpu);
  kernel({{call.in.data(), call.in.size()},
          {call.out.data(), call.out.size()},
          call.attrs,
          Stream{kCpu},
          call.row.pointwise ? &*call.row.pointwise : nullptr,
          &call.row});
}

void run_later(const KernelArgs& args) {
  const op::OpDef& row = *args.row;
  const auto call = std::make_shared<Call>(Call{row, args.attrs, {}, {}});
  for (const Tensor& x : args.in) call->in.push_back(seen_by_stream(x));
  for (const Tensor& x : args.out) {
    call->out.push_back(row.dynamic ? Tensor{} : seen_by_stream(x));
    if (!row.dynamic && x.elems() > 0) {
      sim::set_label(x.device(), x.raw(), concat("the result ", x.sizes(), " (", x.dtype(), ") of ", row.name));
    }
  }
  sim::put(args.stream, [call] { run_now(*call); });
  if (!row.dynamic) return;
  // What the results look like is known only now.
  synchronize(args.stream);
  for (size_t i = 0; i < args.out.size(); ++i) {
    args.out[i] = Tensor::empty(call->out[i].sizes(), call->out[i].dtype(), args.stream.device);
    copy_between_devices(call->out[i], args.out[i]);
  }
}

}  // namespace

void add_sim_device(const sim::Options& options) {
  static std::once_flag once;
  std::call_once(once, [&] {
    sim::add_device(options);
    std::vector<op::NamedKernel> kernels;
    for (const op::OpDef* row : op::all_ops()) {
      if (!row->cpu) continue;
      const bool on_host = row == &op::kToDevice || op::communicates(*row);
      kernels.push_back({row->name, on_host ? row->cpu : run_later});
    }
    op::add_kernels(DeviceType::kSim, kernels);
  });
}

}  // namespace chorale::eager
