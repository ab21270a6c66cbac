#include "chorale/io/tensor_bytes.h"

#include <cstring>
#include <string_view>

namespace chorale::io {
namespace {

// Copies dimension `dim` and those behind it, element by element; returns where the output goes on.
std::byte* copy_from(const Tensor& x, size_t dim, const std::byte* from, std::byte* to) {
  const size_t bytes = x.elem_bytes();
  if (dim == x.sizes().size()) {
    std::memcpy(to, from, bytes);
    return to + bytes;
  }
  const auto step = x.strides()[dim] * static_cast<int64_t>(bytes);
  for (int64_t i = 0; i < x.sizes()[dim]; ++i) to = copy_from(x, dim + 1, from + i * step, to);
  return to;
}

}  // namespace

Tensor contiguous_for_file(std::string_view what, const Tensor& x) {
  CHORALE_CHECK(x.defined(), what, " is undefined");
  CHORALE_CHECK(!x.is_sparse(), what, " is sparse; save its indices and values instead");
  CHORALE_CHECK(x.device().type == DeviceType::kCpu, what, " is on device ", x.device(), "; copy it to the CPU first");
  if (x.is_contiguous()) return x;
  Tensor copy = Tensor::empty(x.sizes(), x.dtype());
  copy_from(x, 0, static_cast<const std::byte*>(x.raw()), static_cast<std::byte*>(copy.raw()));
  return copy;
}

std::span<const std::byte> bytes_of(const Tensor& x) {
  return {static_cast<const std::byte*>(x.raw()), static_cast<size_t>(x.elems()) * x.elem_bytes()};
}

}  // namespace chorale::io
