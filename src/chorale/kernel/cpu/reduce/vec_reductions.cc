// The kernels of reductions that vec has loops for.
#include <cmath>
#include <complex>

#include "chorale/kernel/cpu/reduce/reduce.h"

namespace chorale::kernel::cpu {
namespace {

void reduce_with(const char* op, vec::ReduceOp kind, const KernelArgs& args) {
  const Tensor& x = args.in[0];
  const DimMask reduced = dim_mask(op, args.attrs.get<ReduceAttrs>().dims, x.dims());
  reduce(x, reduced, VecFold(kind, x.dtype(), args.out[0].dtype()), args.out[0]);
}

class MeanFold final : public VecFold {
 public:
  MeanFold(DType dtype, int64_t count)
      : VecFold(vec::ReduceOp::kSum, dtype, dtype), count_(static_cast<double>(count)) {}

  // Divided before it is rounded to 16 bits, where the sum may be out of range.
  void finish(void* acc, int64_t n, void* results) const override {
    if (real_of(acc_dtype_) == DType::kF64) {
      divide(static_cast<double*>(acc), n, count_);
    } else {
      divide(static_cast<float*>(acc), n, static_cast<float>(count_));
    }
    VecFold::finish(acc, n, results);
  }

 private:
  template <class T>
  void divide(T* values, int64_t n, T by) const {
    const int64_t parts = is_complex(acc_dtype_) ? 2 * n : n;
    for (int64_t i = 0; i < parts; ++i) values[i] /= by;
  }

  double count_;
};

}  // namespace

void sum(const KernelArgs& args) { reduce_with("sum", vec::ReduceOp::kSum, args); }
void prod(const KernelArgs& args) { reduce_with("prod", vec::ReduceOp::kProd, args); }
void amax(const KernelArgs& args) { reduce_with("amax", vec::ReduceOp::kMax, args); }
void amin(const KernelArgs& args) { reduce_with("amin", vec::ReduceOp::kMin, args); }
void any(const KernelArgs& args) { reduce_with("any", vec::ReduceOp::kAny, args); }
void all(const KernelArgs& args) { reduce_with("all", vec::ReduceOp::kAll, args); }
void count_nonzero(const KernelArgs& args) { reduce_with("count_nonzero", vec::ReduceOp::kSumNonZero, args); }

void mean(const KernelArgs& args) {
  const Tensor& x = args.in[0];
  const DimMask reduced = dim_mask("mean", args.attrs.get<ReduceAttrs>().dims, x.dims());
  reduce(x, reduced, MeanFold(x.dtype(), reduced_count(x.sizes(), reduced)), args.out[0]);
}

}  // namespace chorale::kernel::cpu
