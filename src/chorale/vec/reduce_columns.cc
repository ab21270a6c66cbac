// Reductions of the outer dimension: rows are folded into an accumulator row.
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/reduce_columns.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/kernels.h"
#include "chorale/vec/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows of T, `stride` bytes apart.
template <class T>
struct Matrix {
  const std::byte* data;
  int64_t stride;

  HWY_INLINE const T* row(int64_t r) const { return reinterpret_cast<const T*>(data + r * stride); }
  HWY_INLINE Matrix from_row(int64_t r) const { return {data + r * stride, stride}; }
};

// One row at a time, though accumulators then go through the first-level cache once for every row: memory is read as
// one stream. Reading 2 to 16 rows abreast, which a page lies between, measured 5 to 30 % slower.
template <class Op, class T>
void fold_row(const T* row, size_t n, typename Storage<T>::Compute* acc) {
  using S = Storage<T>;
  using V = typename S::V;
  const typename S::D d;
  constexpr size_t kLanes = S::kLanes;
  size_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    const V s0 = Op::step(hn::LoadU(d, acc + j), S::load(row + j));
    const V s1 = Op::step(hn::LoadU(d, acc + j + kLanes), S::load(row + j + kLanes));
    const V s2 = Op::step(hn::LoadU(d, acc + j + 2 * kLanes), S::load(row + j + 2 * kLanes));
    const V s3 = Op::step(hn::LoadU(d, acc + j + 3 * kLanes), S::load(row + j + 3 * kLanes));
    hn::StoreU(s0, d, acc + j);
    hn::StoreU(s1, d, acc + j + kLanes);
    hn::StoreU(s2, d, acc + j + 2 * kLanes);
    hn::StoreU(s3, d, acc + j + 3 * kLanes);
  }
  for (; j < n; j += kLanes) {
    const size_t count = n - j < kLanes ? n - j : kLanes;
    store_n(Op::step(load_n(d, acc + j, count), S::load_first(row + j, count)), d, acc + j, count);
  }
}

// acc[j] = acc[j] op partial[j]
template <class Op, class T>
void fold_partial(const T* partial, size_t n, T* acc) {
  const hn::ScalableTag<T> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  for (size_t j = 0; j < n; j += kLanes) {
    const size_t count = n - j < kLanes ? n - j : kLanes;
    store_n(Op::combine(load_n(d, acc + j, count), load_n(d, partial + j, count)), d, acc + j, count);
  }
}

// A tile of accumulators stays in the first-level cache.
constexpr size_t kTileBytes = 8192;

// The tree over rows: 64 are folded one after the other, larger numbers in two halves.
template <class Op, class T>
void fold_tree(Matrix<T> in, int64_t rows, size_t n, typename Storage<T>::Compute* acc) {
  using Compute = typename Storage<T>::Compute;
  if (rows <= 64) {
    for (int64_t r = 0; r < rows; ++r) fold_row<Op, T>(in.row(r), n, acc);
    return;
  }
  const int64_t half = (rows / 2 + 63) / 64 * 64;
  fold_tree<Op, T>(in, half, n, acc);
  HWY_ALIGN Compute second[kTileBytes / sizeof(Compute)];
  const Compute identity = hn::GetLane(Op::identity(typename Storage<T>::D()));
  for (size_t j = 0; j < n; ++j) second[j] = identity;
  fold_tree<Op, T>(in.from_row(half), rows - half, n, second);
  fold_partial<Op>(second, n, acc);
}

template <ReduceOp kOp, class T>
void vector_columns(const void* in, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) {
  using Compute = typename Storage<T>::Compute;
  constexpr int64_t kTile = kTileBytes / sizeof(Compute);
  for (int64_t j = 0; j < n; j += kTile) {
    const Matrix<T> tile{static_cast<const std::byte*>(in) + j * static_cast<int64_t>(sizeof(T)), row_stride_bytes};
    const auto width = static_cast<size_t>(n - j < kTile ? n - j : kTile);
    fold_tree<VectorReduce<kOp>, T>(tile, rows, width, static_cast<Compute*>(acc) + j);
  }
}

template <ReduceOp kOp, class T>
void scalar_columns(const void* in_data, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc_data) {
  using Reduce = ScalarReduce<kOp, T>;
  const Matrix<Stored<T>> in{static_cast<const std::byte*>(in_data), row_stride_bytes};
  auto* __restrict acc = static_cast<typename Reduce::Acc*>(acc_data);
  constexpr int64_t kTile = 1024;
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t end = n - begin < kTile ? n : begin + kTile;
    for (int64_t r = 0; r < rows; ++r) {
      const Stored<T>* row = in.row(r);
      for (int64_t j = begin; j < end; ++j) acc[j] = Reduce::step(acc[j], row[j]);
    }
  }
}

template <class T>
void complex_sum_columns(const void* in, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) {
  vector_columns<ReduceOp::kSum, T>(in, row_stride_bytes, rows, 2 * n, acc);
}

template <ReduceOp kOp, class T>
void combine_loop(const void* partial, int64_t n, void* acc_data) {
  using Reduce = ScalarReduce<kOp, T>;
  using Acc = typename Reduce::Acc;
  const Acc* from = static_cast<const Acc*>(partial);
  Acc* acc = static_cast<Acc*>(acc_data);
  CHORALE_IVDEP
  for (int64_t j = 0; j < n; ++j) acc[j] = Reduce::combine(acc[j], from[j]);
}

template <ReduceOp kOp, class T>
ReduceColumns column_loop() {
  if constexpr (is_floating(dtype_of<T>) && !is_logical(kOp) && kOp != ReduceOp::kSumNonZero) {
    return &vector_columns<kOp, T>;
  } else if constexpr (kIsComplex<T> && kOp == ReduceOp::kSum) {
    return &complex_sum_columns<typename RealOf<T>::type>;
  } else {
    return &scalar_columns<kOp, T>;
  }
}

template <ReduceOp kOp, class T>
void add_columns(Kernels& kernels) {
  constexpr auto kRow = static_cast<size_t>(kOp), kColumn = static_cast<size_t>(dtype_of<T>);
  if constexpr (is_defined(kOp, dtype_of<T>)) {
    kernels.reduce_columns[kRow][kColumn] = column_loop<kOp, T>();
    kernels.reduce_combine[kRow][kColumn] = &combine_loop<kOp, T>;
  }
}

template <ReduceOp kOp>
void add_columns_of(Kernels& kernels) {
#define CHORALE_ADD(T, name) add_columns<kOp, T>(kernels);
  CHORALE_FOR_EACH_DTYPE(CHORALE_ADD)
#undef CHORALE_ADD
}

void add_reduce_columns(Kernels& kernels) {
#define CHORALE_ADD(name) add_columns_of<ReduceOp::name>(kernels);
  CHORALE_FOR_EACH_REDUCE_OP(CHORALE_ADD)
#undef CHORALE_ADD
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_reduce_columns);
void add_reduce_columns(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_reduce_columns)(kernels); }
}  // namespace chorale::vec
#endif
