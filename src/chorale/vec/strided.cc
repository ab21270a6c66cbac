#include "chorale/vec/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "chorale/vec/visit_bytes.h"

namespace chorale::vec {
namespace {

// From this length on, a library call copies faster than the loop below.
constexpr int64_t kLongCopy = 16;

template <class T>
void gather_block(const std::byte* from, int64_t row_stride, int64_t stride, T* to, int64_t rows, int64_t n) {
  for (; rows > 0; --rows, from += row_stride, to += n) {
    if (stride == sizeof(T) && n >= kLongCopy) {
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; ++i) std::memcpy(to + i, from + i * stride, sizeof(T));
    }
  }
}

template <class T>
void scatter_block(const T* from, std::byte* to, int64_t row_stride, int64_t stride, int64_t rows, int64_t n) {
  for (; rows > 0; --rows, from += n, to += row_stride) {
    if (stride == sizeof(T) && n >= kLongCopy) {
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * stride, from + i, sizeof(T));
    }
  }
}

}  // namespace

StridedSpace::StridedSpace(const StridedView& out, std::span<const StridedView> in) : operand_count_(in.size() + 1) {
  const std::span<const int64_t> sizes = out.sizes;
  elems_ = 1;
  // Insertion sort by the output's strides, largest first; dimensions of size 1 do not matter.
  int order[kMaxDims];
  for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
    elems_ *= sizes[static_cast<size_t>(d)];
    if (sizes[static_cast<size_t>(d)] == 1) continue;
    const auto step = [&](int dim) { return std::abs(out.strides[static_cast<size_t>(dim)]); };
    int at = dims_++;
    for (; at > 0 && step(order[at - 1]) < step(d); --at) order[at] = order[at - 1];
    order[at] = d;
  }
  for (int i = 0; i < dims_; ++i) sizes_[i] = sizes[static_cast<size_t>(order[i])];

  for (size_t k = 0; k < operand_count_; ++k) {
    const StridedView& x = k == 0 ? out : in[k - 1];
    StridedOperand& operand = operands_[k];
    operand.data = static_cast<std::byte*>(x.data);
    operand.dtype = x.dtype;
    operand.elem_bytes = size_of(x.dtype);
    const auto missing = static_cast<int>(sizes.size() - x.sizes.size());
    for (int i = 0; i < dims_; ++i) {
      const int d = order[i] - missing;
      const bool repeated = d < 0 || x.sizes[static_cast<size_t>(d)] == 1;
      operand.strides[i] = repeated ? 0 : x.strides[static_cast<size_t>(d)] * static_cast<int64_t>(operand.elem_bytes);
    }
  }
  if (dims_ == 0) {  // one element
    dims_ = 1;
    sizes_[0] = 1;
    for (StridedOperand& operand : operands_) operand.strides[0] = static_cast<int64_t>(operand.elem_bytes);
  }
  merge_dimensions();
  for (size_t k = 0; k < operand_count_; ++k) {
    StridedOperand& operand = operands_[k];
    operand.linear = operand.constant = true;
    auto step = static_cast<int64_t>(operand.elem_bytes);
    for (int i = dims_; i-- > 0;) {
      operand.linear &= operand.strides[i] == step;
      operand.constant &= operand.strides[i] == 0;
      step *= sizes_[i];
    }
  }
}

void StridedSpace::merge_dimensions() {
  int last = 0;
  for (int i = 1; i < dims_; ++i) {
    bool follows = true;
    for (size_t k = 0; k < operand_count_; ++k) {
      follows &= operands_[k].strides[last] == operands_[k].strides[i] * sizes_[i];
    }
    if (follows) {
      sizes_[last] *= sizes_[i];
    } else {
      sizes_[++last] = sizes_[i];
    }
    for (size_t k = 0; k < operand_count_; ++k) operands_[k].strides[last] = operands_[k].strides[i];
  }
  dims_ = last + 1;
}

StridedSpace::Cursor::Cursor(const StridedSpace& space, int64_t position) {
  for (int i = space.dims_; i-- > 0;) {
    index[i] = position % space.sizes_[i];
    position /= space.sizes_[i];
  }
  for (size_t k = 0; k < space.operand_count_; ++k) {
    data[k] = space.operands_[k].data;
    for (int i = 0; i < space.dims_; ++i) data[k] += index[i] * space.operands_[k].strides[i];
  }
}

void StridedSpace::Cursor::next_row(const StridedSpace& space) {
  const int inner = space.dims_ - 1;
  for (size_t k = 0; k < space.operand_count_; ++k) data[k] -= index[inner] * space.operands_[k].strides[inner];
  index[inner] = 0;
  for (int i = inner; i-- > 0;) {
    const bool carries = ++index[i] == space.sizes_[i];
    for (size_t k = 0; k < space.operand_count_; ++k) data[k] += space.operands_[k].strides[i];
    if (!carries) return;
    index[i] = 0;
    for (size_t k = 0; k < space.operand_count_; ++k) data[k] -= space.sizes_[i] * space.operands_[k].strides[i];
  }
}

template <class F>
void StridedSpace::for_each_block(size_t operand, int64_t begin, int64_t end, F&& f) const {
  const StridedOperand& x = operands_[operand];
  const int inner_dim = dims_ - 1, row_dim = dims_ - 2;
  while (begin < end) {
    int64_t index[kMaxDims] = {};
    int64_t rest = begin;
    std::byte* data = x.data;
    for (int i = dims_; i-- > 0;) {
      index[i] = rest % sizes_[i];
      rest /= sizes_[i];
      data += index[i] * x.strides[i];
    }
    // Whole rows as long as there are any, a part of one otherwise.
    int64_t rows = 1, n = std::min(end - begin, sizes_[inner_dim] - index[inner_dim]);
    if (dims_ > 1 && n == sizes_[inner_dim]) rows = std::min((end - begin) / n, sizes_[row_dim] - index[row_dim]);
    f(data, dims_ > 1 ? x.strides[row_dim] : 0, rows, n);
    begin += rows * n;
  }
}

void StridedSpace::gather(size_t operand, int64_t begin, int64_t n, void* buffer) const {
  const StridedOperand& x = operands_[operand];
  visit_bytes(x.elem_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(buffer);
    for_each_block(operand, begin, begin + n, [&](std::byte* from, int64_t row_stride, int64_t rows, int64_t count) {
      gather_block(from, row_stride, x.inner_stride(dims_), to, rows, count);
      to += rows * count;
    });
  });
}

void StridedSpace::scatter(size_t operand, int64_t begin, int64_t n, const void* buffer) const {
  const StridedOperand& x = operands_[operand];
  visit_bytes(x.elem_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(buffer);
    for_each_block(operand, begin, begin + n, [&](std::byte* to, int64_t row_stride, int64_t rows, int64_t count) {
      scatter_block(from, to, row_stride, x.inner_stride(dims_), rows, count);
      from += rows * count;
    });
  });
}

}  // namespace chorale::vec
