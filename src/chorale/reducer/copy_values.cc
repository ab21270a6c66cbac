#include "chorale/reducer/copy_values.h"

#include <cstring>

#include "chorale/base/error.h"
#include "chorale/vec/loops.h"

namespace chorale::reducer {
namespace {

size_t bytes_of(const Tensor& x) { return static_cast<size_t>(x.elems()) * x.elem_bytes(); }

// Element by element, in row-major order of the shape.
void copy_strided(const Tensor& from, const Tensor& to) {
  const size_t elem = from.elem_bytes();
  const auto* source = static_cast<const std::byte*>(from.raw());
  auto* target = static_cast<std::byte*>(to.raw());
  int64_t index[kMaxDims] = {}, source_at = 0, target_at = 0;
  for (int64_t n = from.elems(); n > 0; --n) {
    std::memcpy(target + target_at * static_cast<int64_t>(elem), source + source_at * static_cast<int64_t>(elem), elem);
    for (size_t d = from.sizes().size(); d-- > 0;) {
      source_at += from.strides()[d];
      target_at += to.strides()[d];
      if (++index[d] < from.sizes()[d]) break;
      source_at -= index[d] * from.strides()[d];
      target_at -= index[d] * to.strides()[d];
      index[d] = 0;
    }
  }
}

}  // namespace

void copy_values(const Tensor& from, const Tensor& to) {
  CHORALE_INVARIANT(from.sizes() == to.sizes(), "values of shape ", from.sizes(), " copied to shape ", to.sizes());
  if (from.elems() == 0) return;
  to.storage()->note_write("a copy of gradients");
  const bool same_order = (from.is_contiguous() && to.is_contiguous()) ||
                          (from.strides() == to.strides() && is_dense(from.sizes(), from.strides()));
  if (same_order && from.dtype() == to.dtype()) {
    if (from.raw() != to.raw()) std::memcpy(to.raw(), from.raw(), bytes_of(from));
  } else if (same_order) {
    vec::convert_loop(from.dtype(), to.dtype())(from.raw(), to.raw(), from.elems());
  } else if (from.dtype() == to.dtype()) {
    copy_strided(from, to);
  } else {
    const Tensor converted = Tensor::empty_strided(to.sizes(), contiguous_strides(to.sizes()), from.dtype());
    copy_strided(from, converted);
    const Tensor in_dtype = Tensor::empty(to.sizes(), to.dtype());
    copy_values(converted, in_dtype);
    copy_strided(in_dtype, to);
  }
}

void fill_zero(const Tensor& dense) {
  if (dense.elems() > 0) std::memset(dense.raw(), 0, bytes_of(dense));
}

}  // namespace chorale::reducer
