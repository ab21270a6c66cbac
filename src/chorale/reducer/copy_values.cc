#include "chorale/reducer/copy_values.h"

#include <cstring>

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::reducer {

void copy_values(const Tensor& from, const Tensor& to) {
  CHORALE_INVARIANT(from.sizes() == to.sizes(), "values of shape ", from.sizes(), " copied to shape ", to.sizes());
  if (from.elems() == 0) return;
  to.storage()->note_write("a copy of gradients");
  if (from.device() == kCpu && to.device() == kCpu) {
    if (from.raw() == to.raw() && from.dtype() == to.dtype() && from.strides() == to.strides()) return;
    vec::copy_strided(strided(from), strided(to));
  } else if (from.dtype() == to.dtype()) {
    copy_between_devices(from, to);
  } else {
    // Devices convert by ops, which this layer does not know: the host does it.
    const Tensor converted = Tensor::empty(to.sizes(), to.dtype());
    copy_values(on_host(from), converted);
    copy_between_devices(converted, to);
  }
}

void fill_zero(const Tensor& dense) {
  if (dense.elems() == 0) return;
  if (dense.device() == kCpu) {
    std::memset(dense.raw(), 0, static_cast<size_t>(dense.elems()) * dense.elem_bytes());
    return;
  }
  const std::byte zero[16] = {};  // of every dtype
  runtime_of(dense.device()).fill(zero, strided(dense), current_stream(dense.device()));
}

Tensor copy_of(const Tensor& view) {
  Tensor copy = Tensor::empty_strided(view.sizes(), view.strides(), view.dtype(), view.device());
  copy_values(view, copy);
  return copy;
}

bool same_place(const Tensor& gradient, const Tensor& view) {
  return gradient.is(view) || (gradient.raw() == view.raw() && gradient.storage() == view.storage() &&
                               gradient.strides() == view.strides() && gradient.dtype() == view.dtype());
}

}  // namespace chorale::reducer
