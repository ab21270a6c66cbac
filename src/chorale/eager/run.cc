#include "chorale/eager/run.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/op/copy.h"
#include "chorale/op/kernels.h"
#include "chorale/op/lists.h"
#include "chorale/op/prepare.h"
#include "chorale/op/table.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::eager {
namespace {

using op::OpDef;
using op::OutSpec;
using op::OutSpecs;

Tensor make(OutSpec& spec, std::span<const Tensor> in) {
  if (spec.view_of >= 0) {
    return in[static_cast<size_t>(spec.view_of)].view_as(std::move(spec.sizes), std::move(spec.strides), spec.offset);
  }
  if (spec.strided) return Tensor::empty_strided(spec.sizes, spec.strides, spec.dtype, spec.device);
  return Tensor::empty(std::move(spec));
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

void write_stretch(const Tensor& stretch, RandomStream stream) {
  auto* place = static_cast<int64_t*>(stretch.raw());
  place[0] = static_cast<int64_t>(stream.seed);
  place[1] = static_cast<int64_t>(stream.offset);
}

}  // namespace

// Rows get their numbers before the first call.
Eager::Eager() : Builder(op::Place::kBottom) { op::all_ops(); }

void Eager::call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out, op::Rest) {
  if (op.dynamic) {
    op::check_inputs(op, in);
    CHORALE_CHECK(in[0].device().type != DeviceType::kNull, "[", op.name,
                  "] the shape of its result depends on data, and tensors on the null device have none");
    op::launch(op, in[0].device(), in, attrs, out);
    return;
  }
  if (out.size() == 1) [[likely]] {
    OutSpec spec;
    op::prepare(op, in, attrs, {&spec, 1});
    const Device device = spec.device;
    out[0] = make(spec, in);
    op::launch(op, device, in, attrs, out);
    return;
  }
  OutSpecs specs = op::prepare(op, in, attrs, out.size());
  const Device device = specs[0].device;
  for (size_t i = 0; i < out.size(); ++i) out[i] = make(specs[i], in);
  op::launch(op, device, in, attrs, out);
}

void Eager::call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                      op::Rest) {
  if (op.lists) {
    if (const op::ListCall lists(op, in, attrs); lists.in_place(out)) {
      op::prepare_in_place(op, lists, in, attrs, out);
      // Kernels over lists write into the memory of their results and leave the handles as they are.
      op::launch(op, in.back().device(), in, attrs, {const_cast<Tensor*>(out.data()), out.size()});
      op::note_writes(op, out);
      return;
    }
  }
  OutSpecs specs = op::prepare_into(op, in, attrs, out);
  const Device device = specs[0].device;
  bool direct = true;
  for (size_t i = 0; i < out.size(); ++i) direct &= writes_directly(op, in, out[i], specs[i]);
  Tensors targets;
  for (size_t i = 0; i < out.size(); ++i) targets.push_back(direct ? out[i] : make(specs[i], in));
  op::launch(op, device, in, attrs, {targets.data(), targets.size()});
  if (!direct) {
    for (size_t i = 0; i < out.size(); ++i) {
      Tensor target = out[i];
      op::launch(op::kTo, device, {&targets[i], 1}, op::CopyAttrs{target.dtype()}, {&target, 1});
    }
  }
  op::note_writes(op, out);
}

Tensor Eager::draw(Generator& generator, int64_t words, Device device, op::Rest) {
  const RandomStream stream = generator.take(words);
  if (device.type == DeviceType::kCpu) [[likely]] {
    // A call that keeps nothing of its stretch leaves it to the next one on this thread.
    thread_local Tensor last;
    if (!last.defined() || !last.impl()->is_sole() || !last.storage()->is_sole())
      last = Tensor::empty({2}, DType::kI64, device);
    write_stretch(last, stream);
    return last;
  }
  Tensor stretch = Tensor::empty({2}, DType::kI64, device);
  if (device.type == DeviceType::kNull) return stretch;
  const Tensor host = empty_pinned({2}, DType::kI64, device);
  write_stretch(host, stream);
  copy_between_devices(host, stretch);
  return stretch;
}

void Eager::set_data(const Tensor& x, const Tensor& other, op::Rest) { x.set_data(other); }

}  // namespace chorale::eager
