#include "chorale/io/tensor_bytes.h"

#include <algorithm>
#include <cstring>

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

Tensor tensor_in_file(const std::shared_ptr<const MappedFile>& file, size_t begin, const Shape& sizes,
                      const Strides& strides, DType dtype, ByteOrder order) {
  const size_t bytes = static_cast<size_t>(count_elems(sizes)) * size_of(dtype);
  if (bytes == 0) return Tensor::empty(sizes, dtype);
  const std::byte* data = file->bytes().subspan(begin, bytes).data();
  const bool aligned = reinterpret_cast<uintptr_t>(data) % std::min<size_t>(size_of(dtype), 8) == 0;
  if (!aligned || order == ByteOrder::kBig) {
    Tensor copy = Tensor::empty_strided(sizes, strides, dtype);
    std::memcpy(copy.raw(), data, bytes);
    if (order == ByteOrder::kBig) swap_bytes(copy);
    return copy;
  }
  auto storage = Storage::wrap(
      const_cast<std::byte*>(data), bytes, kCpu, [keep = file] {}, Access::kReadOnly);
  return Tensor::on(std::move(storage), sizes, strides, 0, dtype);
}

void swap_bytes(const Tensor& x) {
  const size_t bytes = size_of(real_of(x.dtype()));
  auto* at = static_cast<std::byte*>(x.raw());
  const std::byte* end = at + static_cast<size_t>(x.elems()) * x.elem_bytes();
  if (bytes == 1) return;
  for (; at != end; at += bytes) std::reverse(at, at + bytes);
}

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
