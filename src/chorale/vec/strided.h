// Walking over memory of any strides in step. The dimensions of a result and of its inputs (broadcast to it) are put
// in the order of the result's memory and merged where every operand allows, so that most calls end up with one or two.
// Elements are then numbered along these dimensions: "positions" below.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "chorale/base/dims.h"
#include "chorale/base/dtype.h"

namespace chorale::vec {

// Elements at any strides, which are in elements and may be 0 or negative. `data` is the address of element 0.
struct StridedView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::span<const int64_t> sizes{};
  std::span<const int64_t> strides{};
};

struct StridedOperand {
  std::byte* data = nullptr;  // of position 0
  size_t elem_bytes = 0;
  DType dtype = DType::kF32;
  int64_t strides[kMaxDims] = {};  // in bytes, per merged dimension
  bool linear = false;             // position p lies at data + p * elem_bytes
  bool constant = false;           // one element stands for all

  int64_t inner_stride(int dims) const { return strides[dims - 1]; }
};

class StridedSpace {
 public:
  static constexpr size_t kMaxOperands = 5;

  // Operand 0 is `out`, operand i + 1 is in[i], broadcast to it. There must be elements.
  StridedSpace(const StridedView& out, std::span<const StridedView> in);

  int64_t elems() const { return elems_; }
  int dims() const { return dims_; }  // at least 1
  int64_t size(int dim) const { return sizes_[dim]; }
  int64_t inner() const { return sizes_[dims_ - 1]; }
  const StridedOperand& operator[](size_t operand) const { return operands_[operand]; }

  // Positions begin to begin + n of an operand into contiguous memory, and back.
  void gather(size_t operand, int64_t begin, int64_t n, void* buffer) const;
  void scatter(size_t operand, int64_t begin, int64_t n, const void* buffer) const;

  // Calls f(data, n) for the stretches along the innermost dimension that cover positions begin to end: data[i] points
  // to operand i.
  template <class F>
  void for_each_row(int64_t begin, int64_t end, F&& f) const {
    if (dims_ == 2) {  // most calls: short rows must not cost more than their elements
      int64_t row = begin / inner(), at = begin % inner();
      for (; begin < end; ++row, at = 0) {
        const int64_t n = std::min(end - begin, inner() - at);
        std::byte* data[kMaxOperands];
        // All of them, used or not: straight code instead of a loop of unknown length.
        for (size_t k = 0; k < kMaxOperands; ++k) {
          data[k] = operands_[k].data + row * operands_[k].strides[0] + at * operands_[k].strides[1];
        }
        f(static_cast<std::byte* const*>(data), n);
        begin += n;
      }
      return;
    }
    Cursor cursor(*this, begin);
    while (begin < end) {
      const int64_t n = std::min(end - begin, inner() - cursor.index[dims_ - 1]);
      f(static_cast<std::byte* const*>(cursor.data), n);
      begin += n;
      cursor.next_row(*this);
    }
  }

 private:
  struct Cursor {
    Cursor(const StridedSpace& space, int64_t position);
    void next_row(const StridedSpace& space);

    int64_t index[kMaxDims];
    std::byte* data[kMaxOperands];
  };

  // Calls f(data, row_stride, rows, n) for one operand: rows of n elements each. Few calls where rows are short.
  template <class F>
  void for_each_block(size_t operand, int64_t begin, int64_t end, F&& f) const;
  void merge_dimensions();

  int dims_ = 0;
  size_t operand_count_ = 0;
  int64_t elems_ = 0;
  int64_t sizes_[kMaxDims] = {};
  StridedOperand operands_[kMaxOperands];
};

}  // namespace chorale::vec
