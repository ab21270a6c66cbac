// Reductions over Highway vectors: what an operation does with vectors, and the tree in which sums are formed. Read
// once per target.
#if defined(CHORALE_VEC_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_REDUCE_INL_H_
#undef CHORALE_VEC_REDUCE_INL_H_
#else
#define CHORALE_VEC_REDUCE_INL_H_
#endif

#include <limits>

#include "hwy/highway.h"

#include "chorale/vec/loops.h"
#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A reduction of vectors: combine(combine(identity, x), y), where an element x is first mapped to what is summed up.
template <ReduceOp kOp>
struct VectorReduce {
  template <class D>
  static HWY_INLINE hn::Vec<D> identity(D d) {
    using T = hn::TFromD<D>;
    return hn::Set(d, ScalarReduce<kOp, T>::identity());
  }
  template <class V>
  static HWY_INLINE V combine(V a, V b) {
    if constexpr (kOp == ReduceOp::kProd) {
      return hn::Mul(a, b);
    } else if constexpr (kOp == ReduceOp::kMax || kOp == ReduceOp::kMaxAbs) {
      // NaN wins: x86's max returns its second argument if either is NaN.
      return hn::IfThenElse(hn::IsNaN(a), a, hn::Max(a, b));
    } else if constexpr (kOp == ReduceOp::kMin || kOp == ReduceOp::kMinAbs) {
      return hn::IfThenElse(hn::IsNaN(a), a, hn::Min(a, b));
    } else {
      return hn::Add(a, b);
    }
  }
  template <class V>
  static HWY_INLINE V step(V acc, V x) {
    if constexpr (kOp == ReduceOp::kSumSquares) {
      return hn::MulAdd(x, x, acc);
    } else if constexpr (is_of_magnitudes(kOp)) {
      return combine(acc, hn::Abs(x));
    } else {
      return combine(acc, x);
    }
  }
};

// All lanes combined, as a tree.
template <class Op, class V>
HWY_INLINE auto combine_lanes(V v) {
  const hn::DFromV<V> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  if constexpr (kLanes >= 16) v = Op::combine(v, hn::Reverse(d, v));
  if constexpr (kLanes >= 8) v = Op::combine(v, hn::Reverse8(d, v));
  if constexpr (kLanes >= 4) v = Op::combine(v, hn::Reverse4(d, v));
  v = Op::combine(v, hn::Reverse2(d, v));
  return hn::GetLane(v);
}

// Partial results in a binary tree whose leaves arrive one by one: like a binary counter, two of equal weight are
// combined as soon as there are two. The depth of a sum of n leaves is log2(n).
template <class Op, class V>
class Cascade {
 public:
  HWY_INLINE void push(V v) {
    size_t level = 0;
    for (size_t k = count_; (k & 1) != 0; k >>= 1) v = Op::combine(levels_[level++], v);
    levels_[level] = v;
    ++count_;
  }
  // At least one leaf has arrived.
  HWY_INLINE V result() const {
    size_t level = 0, k = count_;
    for (; (k & 1) == 0; k >>= 1) ++level;
    V v = levels_[level];
    for (k >>= 1, ++level; k != 0; k >>= 1, ++level) {
      if ((k & 1) != 0) v = Op::combine(levels_[level], v);
    }
    return v;
  }

 private:
  size_t count_ = 0;
  V levels_[48];
};

// Reduces n elements to one vector whose lanes remain to be combined. body.step(s, i) adds the elements from i on to s,
// body.last(s, i, count) the last few.
template <class Op, class V, class Body>
HWY_INLINE V reduce_vectors(size_t n, const Body& body) {
  const hn::DFromV<V> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  // Eight accumulators hide the latency of additions; up to 16 steps of them form a leaf of the tree.
  constexpr size_t kStep = 8 * kLanes, kLeaf = 16 * kStep;
  const V identity = Op::identity(d);
  V s = identity;
  size_t i = 0;
  const auto leaf = [&](size_t end) HWY_ATTR {
    V s0 = identity, s1 = identity, s2 = identity, s3 = identity;
    V s4 = identity, s5 = identity, s6 = identity, s7 = identity;
    for (; i < end; i += kStep) {
      s0 = body.step(s0, i);
      s1 = body.step(s1, i + kLanes);
      s2 = body.step(s2, i + 2 * kLanes);
      s3 = body.step(s3, i + 3 * kLanes);
      s4 = body.step(s4, i + 4 * kLanes);
      s5 = body.step(s5, i + 5 * kLanes);
      s6 = body.step(s6, i + 6 * kLanes);
      s7 = body.step(s7, i + 7 * kLanes);
    }
    const V low = Op::combine(Op::combine(s0, s1), Op::combine(s2, s3));
    const V high = Op::combine(Op::combine(s4, s5), Op::combine(s6, s7));
    return Op::combine(low, high);
  };
  const size_t whole = n - n % kStep;
  if (whole > kLeaf) {
    Cascade<Op, V> cascade;
    while (i < whole) cascade.push(leaf(whole - i < kLeaf ? whole : i + kLeaf));
    s = cascade.result();
  } else if (whole > 0) {
    s = leaf(whole);
  }
  for (; i + kLanes <= n; i += kLanes) s = body.step(s, i);
  return i < n ? body.last(s, i, n - i) : s;
}

// The usual body: elements of one array.
template <class Op, class T>
struct RowBody {
  using V = typename Storage<T>::V;
  const T* in;

  HWY_INLINE V step(V s, size_t i) const { return Op::step(s, Storage<T>::load(in + i)); }
  HWY_INLINE V last(V s, size_t i, size_t count) const {
    return hn::IfThenElse(hn::FirstN(typename Storage<T>::D(), count),
                          Op::step(s, Storage<T>::load_first(in + i, count)), s);
  }
};

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
