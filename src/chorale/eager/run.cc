#include "chorale/eager/run.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/op/copy.h"

namespace chorale::eager {
namespace {

using op::OpDef;
using op::OutSpec;
using Specs = SmallVector<OutSpec, 2>;

// All inputs live on one device; without inputs the specs say which.
void check_inputs(const OpDef& op, std::span<const Tensor> in) {
  Device device{};
  bool found = false;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined()) continue;
    CHORALE_CHECK(!in[i].is_sparse(), "[", op.name, "] takes dense tensors, and input ", i,
                  " is sparse; see op/sparse.h, or call to_dense() first");
    if (!found) {
      device = in[i].device();
      found = true;
      CHORALE_CHECK(op.dtypes.has(in[i].dtype()), "[", op.name, "] is not defined for ", in[i].dtype(), " tensors");
    }
    CHORALE_CHECK(in[i].device() == device, "[", op.name, "] inputs are on different devices: ", device, " and ",
                  in[i].device(), "; move one of them");
  }
}

void launch(const OpDef& op, Device device, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) {
  if (op.view || device.type == DeviceType::kNull) return;
  const kernel::Kernel kernel = device.type == DeviceType::kCpu ? op.cpu : op.cuda;
  kernel({in, out, attrs, Stream{device}});
}

Tensor make(OutSpec& spec, std::span<const Tensor> in) {
  if (spec.view_of >= 0) {
    return in[static_cast<size_t>(spec.view_of)].view_as(std::move(spec.sizes), std::move(spec.strides), spec.offset);
  }
  if (spec.strided) return Tensor::empty_strided(spec.sizes, spec.strides, spec.dtype, spec.device);
  return Tensor::empty({std::move(spec.sizes), spec.dtype, spec.device});
}

int category(DType dtype) { return is_complex(dtype) ? 3 : is_floating(dtype) ? 2 : dtype == DType::kBool ? 0 : 1; }

void check_output(const OpDef& op, const Tensor& out, const OutSpec& spec) {
  out.storage()->check_writable(op.name);
  CHORALE_CHECK(out.sizes() == spec.sizes, "[", op.name, "] the result has shape ", spec.sizes,
                " but the tensor to write into has ", out.sizes());
  CHORALE_CHECK(category(spec.dtype) <= category(out.dtype()), "[", op.name, "] a result of ", spec.dtype,
                " cannot be written into a tensor of ", out.dtype(), " without losing its kind; cast it first");
  CHORALE_CHECK(out.device() == spec.device, "[", op.name, "] the result is on ", spec.device,
                " but the tensor to write into is on ", out.device());
  for (size_t d = 0; d < out.sizes().size(); ++d) {
    CHORALE_CHECK(out.sizes()[d] <= 1 || out.strides()[d] != 0, "[", op.name,
                  "] cannot write into an expanded tensor of shape ", out.sizes(),
                  ": several elements share one place in memory; clone it first");
  }
}

bool same_view(const Tensor& a, const Tensor& b) {
  return a.raw() == b.raw() && a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// May the kernel write straight into `out`? Pointwise kernels take any layout and dtype, and an output that is exactly
// an input; the others want the memory that inference describes, to themselves.
bool writes_directly(const OpDef& op, std::span<const Tensor> in, const Tensor& out, const OutSpec& spec) {
  if (op.view || op.dynamic) return false;
  if (!op.in_place) {
    const bool layout_fits = spec.strided ? out.strides() == spec.strides : out.is_contiguous();
    if (!layout_fits || out.dtype() != spec.dtype) return false;
  }
  return std::none_of(in.begin(), in.end(), [&](const Tensor& x) {
    return x.defined() && x.overlaps(out) && !(op.in_place && same_view(x, out));
  });
}

}  // namespace

void Eager::call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) {
  check_inputs(op, in);
  if (op.dynamic) {
    CHORALE_CHECK(in[0].device().type != DeviceType::kNull, "[", op.name,
                  "] the shape of its result depends on data, and tensors on the null device have none");
    launch(op, in[0].device(), in, attrs, out);
    return;
  }
  Specs specs(out.size());
  op.infer({op, in, attrs}, {specs.data(), specs.size()});
  const Device device = specs[0].device;
  for (size_t i = 0; i < out.size(); ++i) out[i] = make(specs[i], in);
  launch(op, device, in, attrs, out);
}

void Eager::call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out) {
  check_inputs(op, in);
  CHORALE_CHECK(!op.dynamic, "[", op.name, "] has no in-place or out form: the shape of its result depends on data");
  Specs specs(out.size());
  op.infer({op, in, attrs}, {specs.data(), specs.size()});
  const Device device = specs[0].device;
  // Everything is checked before the first byte is written.
  Tensors targets;
  bool direct = true;
  for (size_t i = 0; i < out.size(); ++i) {
    check_output(op, out[i], specs[i]);
    direct &= writes_directly(op, in, out[i], specs[i]);
  }
  for (size_t i = 0; i < out.size(); ++i) targets.push_back(direct ? out[i] : make(specs[i], in));
  launch(op, device, in, attrs, {targets.data(), targets.size()});
  if (!direct) {
    for (size_t i = 0; i < out.size(); ++i) {
      Tensor target = out[i];
      launch(op::kTo, device, {&targets[i], 1}, op::CopyAttrs{target.dtype()}, {&target, 1});
    }
  }
  for (const Tensor& written : out) written.storage()->note_write(op.name);
}

}  // namespace chorale::eager
