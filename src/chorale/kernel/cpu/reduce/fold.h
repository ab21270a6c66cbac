// Folding many elements into one: what a reduction does, apart from which elements (reduce_plan.h) and on how many
// threads (reduce.h). A fold keeps accumulators of its own kind and folds contiguous rows, or the columns of matrices,
// into them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chorale/base/dtype.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {

inline constexpr size_t kMaxAccBytes = 32;

class Fold {
 public:
  DType in;          // of the elements it reads: others are converted first
  DType out;         // of the results it gives
  size_t acc_bytes;  // at most kMaxAccBytes; aligned to 16

  // n accumulators of nothing.
  virtual void identity(void* acc, int64_t n) const = 0;
  // in[0] … in[n - 1] into one accumulator.
  virtual void row(const void* in, int64_t n, void* acc) const = 0;
  // in[r][j] into acc[j]: rows are row_stride_bytes apart.
  virtual void columns(const void* in, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) const = 0;
  // acc[j] = acc[j] with partial[j], which was folded from later elements.
  virtual void combine(const void* partial, int64_t n, void* acc) const = 0;
  // n results from n accumulators, which may be overwritten.
  virtual void finish(void* acc, int64_t n, void* out) const = 0;

 protected:
  Fold(DType in_dtype, DType out_dtype, size_t bytes) : in(in_dtype), out(out_dtype), acc_bytes(bytes) {}
  ~Fold() = default;
};

// The folds that vec has loops for. Results are the accumulators, converted.
class VecFold : public Fold {
 public:
  VecFold(vec::ReduceOp op, DType in_dtype, DType out_dtype);

  void identity(void* acc, int64_t n) const override;
  void row(const void* data, int64_t n, void* acc) const final { row_(data, n, acc); }
  void columns(const void* data, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) const final {
    columns_(data, row_stride_bytes, rows, n, acc);
  }
  void combine(const void* partial, int64_t n, void* acc) const final { combine_(partial, n, acc); }
  void finish(void* acc, int64_t n, void* results) const override { convert_(acc, results, n); }

 protected:
  DType acc_dtype_;

 private:
  vec::ReduceOp op_;
  vec::ReduceRow row_;
  vec::ReduceColumns columns_;
  vec::ReduceCombine combine_;
  vec::Convert convert_;
};

}  // namespace chorale::kernel::cpu
