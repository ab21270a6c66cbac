#include "chorale/vec/combine.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/combine.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/vec/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How a value is changed on its way: a factor on each source, or a divisor of the result. Never both, and a division by
// 1 is not free: it is ten times a product.
enum class Scale : uint8_t { kNone, kFactor, kDivisor };
struct Scaling {
  Scale kind = Scale::kNone;
  double by = 1;
};

// A few vectors of every source at a time, folded along the tree of Note [Order of sums] as a binary counter counts:
// two partial results of equal weight are combined as soon as there are two.
template <class Op, class T, Scale kScale>
void combine_floats(const T* const* in, size_t sources, T* out, size_t n, Scaling scaling) {
  using S = Storage<T>;
  using V = typename S::V;
  const typename S::D d;
  using Compute = typename S::Compute;
  constexpr size_t kLanes = S::kLanes;
  const V by = hn::Set(d, static_cast<Compute>(scaling.by));
  const auto leaf = [&](V v) { return kScale == Scale::kFactor ? hn::Mul(v, by) : v; };
  const auto finish = [&](V v) { return kScale == Scale::kDivisor ? hn::Div(v, by) : v; };
  size_t j = 0;
  if (sources == 2) {
    for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
      const V a = Op::combine(leaf(S::load(in[0] + j)), leaf(S::load(in[1] + j)));
      const V b = Op::combine(leaf(S::load(in[0] + j + kLanes)), leaf(S::load(in[1] + j + kLanes)));
      S::store(finish(a), out + j);
      S::store(finish(b), out + j + kLanes);
    }
  }
  V levels[32];
  const auto tree = [&](const auto& load) {
    for (size_t r = 0; r < sources; ++r) {
      V v = leaf(load(in[r] + j));
      size_t level = 0;
      for (size_t count = r; (count & 1) != 0; count >>= 1) v = Op::combine(levels[level++], v);
      levels[level] = v;
    }
    size_t level = 0, rest = sources;
    for (; (rest & 1) == 0; rest >>= 1) ++level;
    V v = levels[level];
    for (rest >>= 1, ++level; rest != 0; rest >>= 1, ++level) {
      if ((rest & 1) != 0) v = Op::combine(levels[level], v);
    }
    return finish(v);
  };
  for (; j + kLanes <= n; j += kLanes) S::store(tree([](const T* from) { return S::load(from); }), out + j);
  if (j < n) {
    const size_t count = n - j;
    S::store_first(tree([count](const T* from) { return S::load_first(from, count); }), out + j, count);
  }
}

// Integers and bool: every order gives the same bits, so sources are simply folded one after the other.
template <Reduce kOp, class T>
HWY_INLINE T combine_pair(T a, T b) {
  using Wide = uint64_t;  // wraps around instead of being undefined
  switch (kOp) {
    case Reduce::kSum:
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    case Reduce::kProduct:
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case Reduce::kMin:
      return b < a ? b : a;
    case Reduce::kMax:
      return b > a ? b : a;
    case Reduce::kBitAnd:
      return static_cast<T>(a & b);
    case Reduce::kBitOr:
      return static_cast<T>(a | b);
    default:
      return static_cast<T>(a ^ b);
  }
}
template <Reduce kOp, class T>
void combine_integers(const T* const* in, size_t sources, T* out, size_t n, Scaling) {
  if (sources == 1) {
    std::memmove(out, in[0], n * sizeof(T));
    return;
  }
  // Values go through a block of our own: the result may be one of the sources that are still to be read.
  constexpr size_t kBlock = 4096 / sizeof(T);
  alignas(64) T block[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const T *a = in[0] + begin, *b = in[1] + begin;
    for (size_t j = 0; j < count; ++j) block[j] = combine_pair<kOp>(a[j], b[j]);
    for (size_t r = 2; r < sources; ++r) {
      const T* more = in[r] + begin;
      for (size_t j = 0; j < count; ++j) block[j] = combine_pair<kOp>(block[j], more[j]);
    }
    std::memcpy(out + begin, block, count * sizeof(T));
  }
}

using Loop = void (*)(const void* const* in, size_t sources, void* out, size_t n, Scaling scaling);

template <ReduceOp kOp, class T, Scale kScale = Scale::kNone>
void float_loop(const void* const* in, size_t sources, void* out, size_t n, Scaling scaling) {
  combine_floats<VectorReduce<kOp>, T, kScale>(reinterpret_cast<const T* const*>(in), sources, static_cast<T*>(out), n,
                                               scaling);
}
template <Reduce kOp, class T>
void integer_loop(const void* const* in, size_t sources, void* out, size_t n, Scaling scaling) {
  combine_integers<kOp, T>(reinterpret_cast<const T* const*>(in), sources, static_cast<T*>(out), n, scaling);
}

template <class T>
Loop loop_of(Reduce op, Scale scale) {
  if constexpr (is_floating(dtype_of<T>)) {
    switch (op) {
      case Reduce::kProduct:
        return &float_loop<ReduceOp::kProd, T>;
      case Reduce::kMin:
        return &float_loop<ReduceOp::kMin, T>;
      case Reduce::kMax:
        return &float_loop<ReduceOp::kMax, T>;
      default:
        return scale == Scale::kNone     ? &float_loop<ReduceOp::kSum, T>
               : scale == Scale::kFactor ? &float_loop<ReduceOp::kSum, T, Scale::kFactor>
                                         : &float_loop<ReduceOp::kSum, T, Scale::kDivisor>;
    }
  } else {
    switch (op) {
      case Reduce::kProduct:
        return &integer_loop<Reduce::kProduct, T>;
      case Reduce::kMin:
        return &integer_loop<Reduce::kMin, T>;
      case Reduce::kMax:
        return &integer_loop<Reduce::kMax, T>;
      case Reduce::kBitAnd:
        return &integer_loop<Reduce::kBitAnd, T>;
      case Reduce::kBitOr:
        return &integer_loop<Reduce::kBitOr, T>;
      case Reduce::kBitXor:
        return &integer_loop<Reduce::kBitXor, T>;
      default:
        return &integer_loop<Reduce::kSum, T>;
    }
  }
}

Loop find_loop(Reduce op, DType dtype, Scale scale) {
  return visit_dtype(dtype, [&](auto tag) -> Loop {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool> || kIsComplex<T>) {
      return nullptr;  // mapped to bytes and to pairs of reals before
    } else {
      return loop_of<T>(op, scale);
    }
  });
}

void combine_all(Reduce op, DType dtype, std::span<const void* const> sources, std::span<void* const> destinations,
                 int64_t elems, double factor, size_t average_of) {
  Scaling scaling;
  if (op == Reduce::kAverage) {
    scaling = {Scale::kDivisor, static_cast<double>(average_of)};
  } else if (factor != 1) {
    scaling = {Scale::kFactor, factor};
  }
  const Loop loop = find_loop(op, dtype, scaling.kind);
  const auto n = static_cast<size_t>(elems);
  if (sources.size() <= 16 && destinations.size() == 1) {
    loop(sources.data(), sources.size(), destinations[0], n, scaling);
    return;
  }
  // A block is still in the first-level cache when it is copied to the other destinations.
  const size_t elem = size_of(dtype), block = 16384 / elem;
  constexpr size_t kMost = 256;
  const void* in[kMost];
  CHORALE_INVARIANT(sources.size() <= kMost, "combining ", sources.size(), " sources");
  for (size_t begin = 0; begin < n; begin += block) {
    const size_t count = std::min(block, n - begin), offset = begin * elem;
    for (size_t r = 0; r < sources.size(); ++r) in[r] = static_cast<const std::byte*>(sources[r]) + offset;
    void* first = static_cast<std::byte*>(destinations[0]) + offset;
    loop(in, sources.size(), first, count, scaling);
    for (size_t r = 1; r < destinations.size(); ++r)
      std::memcpy(static_cast<std::byte*>(destinations[r]) + offset, first, count * elem);
  }
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(combine_all);

bool can_combine(Reduce op, DType dtype) {
  switch (op) {
    case Reduce::kNone:
      return false;
    case Reduce::kSum:
      return true;
    case Reduce::kAverage:
      return is_floating(dtype) || is_complex(dtype);
    case Reduce::kProduct:
    case Reduce::kMin:
    case Reduce::kMax:
      return !is_complex(dtype);
    default:
      return dtype == DType::kBool || is_integral(dtype);
  }
}

void combine(Reduce op, DType dtype, std::span<const void* const> sources, std::span<void* const> destinations,
             int64_t n, double factor, size_t average_of) {
  if (n == 0 || destinations.empty()) return;
  if (is_complex(dtype)) {
    dtype = real_of(dtype);
    n *= 2;
  } else if (dtype == DType::kBool) {
    dtype = DType::kU8;
    if (op == Reduce::kSum || op == Reduce::kMax) op = Reduce::kBitOr;
    if (op == Reduce::kProduct || op == Reduce::kMin) op = Reduce::kBitAnd;
  }
  HWY_DYNAMIC_DISPATCH(combine_all)
  (op, dtype, sources, destinations, n, factor, average_of > 0 ? average_of : sources.size());
}

}  // namespace chorale::vec
#endif
