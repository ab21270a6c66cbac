// Inner products, and the places of extreme values.
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/dot_arg.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/kernels.h"
#include "chorale/vec/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- inner products

template <class T>
struct DotBody {
  using V = typename Storage<T>::V;
  const T* a;
  const T* b;

  HWY_INLINE V step(V s, size_t i) const { return hn::MulAdd(Storage<T>::load(a + i), Storage<T>::load(b + i), s); }
  HWY_INLINE V last(V s, size_t i, size_t count) const {
    return hn::MulAdd(Storage<T>::load_first(a + i, count), Storage<T>::load_first(b + i, count), s);
  }
};

template <class T>
void vector_dot(const void* a, const void* b, int64_t n, void* out) {
  using Sum = VectorReduce<ReduceOp::kSum>;
  const DotBody<T> body{static_cast<const T*>(a), static_cast<const T*>(b)};
  const auto s = reduce_vectors<Sum, typename Storage<T>::V>(static_cast<size_t>(n), body);
  *static_cast<typename Storage<T>::Compute*>(out) = combine_lanes<Sum>(s);
}

template <class T>
void scalar_dot(const void* a_data, const void* b_data, int64_t n, void* out) {
  using Sum = ScalarReduce<ReduceOp::kSum, T>;
  using Product = ScalarReduce<ReduceOp::kProd, T>;
  using Acc = typename Sum::Acc;
  const auto* a = static_cast<const Stored<T>*>(a_data);
  const auto* b = static_cast<const Stored<T>*>(b_data);
  constexpr int64_t kPiece = 64;
  Cascade<Sum, Acc> cascade;
  cascade.push(Sum::identity());
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t end = n - begin < kPiece ? n : begin + kPiece;
    Acc sum = Sum::identity();
    for (int64_t i = begin; i < end; ++i) sum = Sum::combine(sum, Product::step(static_cast<Acc>(a[i]), b[i]));
    cascade.push(sum);
  }
  *static_cast<Acc*>(out) = cascade.result();
}

// ---- the place of the extreme value. Pieces are reduced one after the other; only the piece that held the winner is
// searched.

// The first place in [0, n) where in[i] equals `value`, or where it is NaN if value is. There is one.
template <class T>
HWY_INLINE int64_t place_of(const T* in, int64_t n, typename Storage<T>::Compute value) {
  using S = Storage<T>;
  const typename S::D d;
  const auto wanted = hn::Set(d, value);
  const bool wants_nan = value != value;
  const auto size = static_cast<size_t>(n);
  for (size_t i = 0; i < size; i += S::kLanes) {
    const size_t count = size - i < S::kLanes ? size - i : S::kLanes;
    const auto x = S::load_first(in + i, count);
    const auto found = hn::And(wants_nan ? hn::IsNaN(x) : hn::Eq(x, wanted), hn::FirstN(d, count));
    const intptr_t lane = hn::FindFirstTrue(d, found);
    if (lane >= 0) return static_cast<int64_t>(i) + lane;
  }
  return 0;
}

template <ReduceOp kOp, class T>
int64_t vector_arg(const void* data, int64_t n) {
  using Op = VectorReduce<kOp>;
  using Compute = typename Storage<T>::Compute;
  constexpr int64_t kPiece = 1024;
  const T* in = static_cast<const T*>(data);
  Compute best = ScalarReduce<kOp, Compute>::identity();
  int64_t best_begin = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const auto count = static_cast<size_t>(n - begin < kPiece ? n - begin : kPiece);
    const auto s = reduce_vectors<Op, typename Storage<T>::V>(count, RowBody<Op, T>{in + begin});
    const Compute extreme = combine_lanes<Op>(s);
    if (kOp == ReduceOp::kMax ? extreme > best : extreme < best) {
      best = extreme;
      best_begin = begin;
    } else if (extreme != extreme) {
      best = extreme;
      best_begin = begin;
      break;
    }
  }
  return best_begin + place_of(in + best_begin, n - best_begin < kPiece ? n - best_begin : kPiece, best);
}

template <ReduceOp kOp, class T>
int64_t integer_arg(const void* data, int64_t n) {
  using Reduce = ScalarReduce<kOp, T>;
  constexpr int64_t kPiece = 256;
  const auto* in = static_cast<const Stored<T>*>(data);
  auto best = Reduce::identity();
  int64_t i = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t end = n - begin < kPiece ? n : begin + kPiece;
    auto extreme = Reduce::identity();
    for (int64_t k = begin; k < end; ++k) extreme = Reduce::step(extreme, in[k]);
    if (kOp == ReduceOp::kMax ? extreme > best : extreme < best) {
      best = extreme;
      i = begin;
    }
  }
  while (in[i] != best) ++i;
  return i;
}

template <class T>
void add_dot_arg_of(Kernels& kernels) {
  constexpr auto kIndex = static_cast<size_t>(dtype_of<T>);
  if constexpr (is_floating(dtype_of<T>)) {
    kernels.dot[kIndex] = &vector_dot<T>;
    kernels.argmax[kIndex] = &vector_arg<ReduceOp::kMax, T>;
    kernels.argmin[kIndex] = &vector_arg<ReduceOp::kMin, T>;
  } else {
    kernels.dot[kIndex] = &scalar_dot<T>;
    if constexpr (!is_complex(dtype_of<T>)) {
      kernels.argmax[kIndex] = &integer_arg<ReduceOp::kMax, T>;
      kernels.argmin[kIndex] = &integer_arg<ReduceOp::kMin, T>;
    }
  }
}

void add_dot_arg(Kernels& kernels) {
#define CHORALE_ADD(T, name) add_dot_arg_of<T>(kernels);
  CHORALE_FOR_EACH_DTYPE(CHORALE_ADD)
#undef CHORALE_ADD
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_dot_arg);
void add_dot_arg(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_dot_arg)(kernels); }
}  // namespace chorale::vec
#endif
