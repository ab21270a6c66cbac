#include "chorale/reducer/sparse_entries.h"

#include <numeric>

#include "chorale/reducer/copy_values.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/vec/combine.h"

namespace chorale::reducer {

Tensor entries_of(const Tensor& gradient, const Shape& sizes, DType dtype, double factor) {
  Tensor indices, values;
  if (gradient.defined() && gradient.is_sparse()) {
    indices = on_host(gradient.sparse().indices);
    values = Tensor::empty(gradient.sparse().values.sizes(), dtype);
    copy_values(gradient.sparse().values, values);
  } else {
    Shape shape = sizes;
    if (!gradient.defined()) shape[0] = 0;
    indices = Tensor::empty({1, shape[0]}, DType::kI64);
    std::iota(indices.data<int64_t>(), indices.data<int64_t>() + shape[0], 0);
    values = Tensor::empty(shape, dtype);
    if (gradient.defined()) copy_values(gradient, values);
  }
  const void* from[] = {values.raw()};
  void* to[] = {values.raw()};
  vec::combine(Reduce::kSum, dtype, from, to, values.elems(), factor);
  return Tensor::sparse_coo(indices, values, sizes);
}

}  // namespace chorale::reducer
