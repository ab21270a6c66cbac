// Reductions of a contiguous row to one value.
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/reduce_row.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/kernels.h"
#include "chorale/vec/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr bool is_counting(ReduceOp op) { return is_logical(op) || op == ReduceOp::kSumNonZero; }

template <ReduceOp kOp, class T>
void vector_row(const void* in, int64_t n, void* acc) {
  using Op = VectorReduce<kOp>;
  using V = typename Storage<T>::V;
  using Compute = typename Storage<T>::Compute;
  const V s = reduce_vectors<Op, V>(static_cast<size_t>(n), RowBody<Op, T>{static_cast<const T*>(in)});
  Compute* result = static_cast<Compute*>(acc);
  *result = ScalarReduce<kOp, Compute>::combine(*result, combine_lanes<Op>(s));
}

// Even lanes are real parts, odd ones imaginary.
template <class T>
void complex_sum_row(const void* in, int64_t n, void* acc) {
  using Op = VectorReduce<ReduceOp::kSum>;
  using V = typename Storage<T>::V;
  const V s = reduce_vectors<Op, V>(2 * static_cast<size_t>(n), RowBody<Op, T>{static_cast<const T*>(in)});
  constexpr size_t kLanes = Storage<T>::kLanes;
  HWY_ALIGN T lanes[kLanes];
  hn::Store(s, typename Storage<T>::D(), lanes);
  for (size_t half = kLanes / 2; half >= 2; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  *static_cast<std::complex<T>*>(acc) += std::complex<T>(lanes[0], lanes[1]);
}
template <class T>
void complex_sum_squares_row(const void* in, int64_t n, void* acc) {
  vector_row<ReduceOp::kSumSquares, T>(in, 2 * n, acc);
}

// Whatever the compiler vectorises by itself: integers and truth values; and complex products, which nobody is in a
// hurry for.
template <ReduceOp kOp, class T>
void scalar_row(const void* in_data, int64_t n, void* acc_data) {
  using Reduce = ScalarReduce<kOp, T>;
  using Acc = typename Reduce::Acc;
  constexpr int64_t kPiece = kIsComplex<T> ? 64 : 2048;
  // Counts and sums of short integers over one piece fit into 32 bits, which is twice as fast as 64.
  constexpr bool kShort =
      kOp == ReduceOp::kSumNonZero || (kOp == ReduceOp::kSum && std::is_integral_v<T> && sizeof(T) <= 2);
  const auto* in = static_cast<const Stored<T>*>(in_data);
  Acc& acc = *static_cast<Acc*>(acc_data);
  Cascade<Reduce, Acc> cascade;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t end = n - begin < kPiece ? n : begin + kPiece;
    if constexpr (kShort) {
      int32_t sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        if constexpr (kOp == ReduceOp::kSum) {
          sum += static_cast<int32_t>(in[i]);
        } else {
          sum += is_nonzero(in[i]) ? 1 : 0;
        }
      }
      cascade.push(sum);
    } else {
      Acc sum = Reduce::identity();
      for (int64_t i = begin; i < end; ++i) sum = Reduce::step(sum, in[i]);
      cascade.push(sum);
      // The answer is known as soon as it differs from the neutral element.
      if (is_logical(kOp) && sum != Reduce::identity()) break;
    }
  }
  if (n > 0) acc = Reduce::combine(acc, cascade.result());
}

template <ReduceOp kOp, class T>
ReduceRow row_loop() {
  constexpr DType kDType = dtype_of<T>;
  if constexpr (!is_defined(kOp, kDType)) {
    return nullptr;
  } else if constexpr (is_floating(kDType) && !is_counting(kOp)) {
    return &vector_row<kOp, T>;
  } else if constexpr (kIsComplex<T> && kOp == ReduceOp::kSum) {
    return &complex_sum_row<typename RealOf<T>::type>;
  } else if constexpr (kIsComplex<T> && kOp == ReduceOp::kSumSquares) {
    return &complex_sum_squares_row<typename RealOf<T>::type>;
  } else {
    return &scalar_row<kOp, T>;
  }
}

template <ReduceOp kOp>
void add_rows_of(Kernels& kernels) {
#define CHORALE_ADD(T, name) \
  kernels.reduce_row[static_cast<size_t>(kOp)][static_cast<size_t>(DType::name)] = row_loop<kOp, T>();
  CHORALE_FOR_EACH_DTYPE(CHORALE_ADD)
#undef CHORALE_ADD
}

void add_reduce_row(Kernels& kernels) {
#define CHORALE_ADD(name) add_rows_of<ReduceOp::name>(kernels);
  CHORALE_FOR_EACH_REDUCE_OP(CHORALE_ADD)
#undef CHORALE_ADD
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_reduce_row);
void add_reduce_row(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_reduce_row)(kernels); }
}  // namespace chorale::vec
#endif
