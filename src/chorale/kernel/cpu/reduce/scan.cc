#include "chorale/kernel/cpu/reduce/scan.h"

#include <algorithm>
#include <complex>
#include <functional>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;
constexpr int64_t kColumns = 1024;  // scans that run side by side where the dimension is not the last

// A running value is kept in more digits than its results have.
template <class T>
struct StateOf {
  using type = T;
};
template <>
struct StateOf<float> {
  using type = double;
};
template <>
struct StateOf<float16> {
  using type = float;
};
template <>
struct StateOf<bfloat16> {
  using type = float;
};
template <>
struct StateOf<std::complex<float>> {
  using type = std::complex<double>;
};
template <>
struct StateOf<int64_t> {
  using type = uint64_t;  // wraps around
};
template <class T>
using State = typename StateOf<T>::type;

// row(offset) for every scan of a contiguous last dimension.
template <class Row>
void for_rows(const Around& x, Row&& row) {
  parallel_for(x.outer, (kGrainElems + x.length - 1) / x.length, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) row(begin * x.length);
  });
}

// step(state, offset) for every element, scans side by side; states start as `initial`.
template <class S, class Step>
void scan_columns(const Around& x, bool reverse, S initial, Step&& step) {
  const auto [outer, n, inner] = x;
  const int64_t tiles = (inner + kColumns - 1) / kColumns;
  const int64_t tile_elems = n * std::min(inner, kColumns);
  parallel_for(outer * tiles, (kGrainElems + tile_elems - 1) / tile_elems,
               [&, n = n, inner = inner](int64_t begin, int64_t end) {
                 for (; begin < end; ++begin) {
                   const int64_t column = begin % tiles * kColumns;
                   const int64_t width = std::min(kColumns, inner - column), base = begin / tiles * n * inner + column;
                   S states[kColumns];
                   std::fill_n(states, width, initial);
                   for (int64_t i = 0; i < n; ++i) {
                     const int64_t at = base + (reverse ? n - 1 - i : i) * inner;
                     for (int64_t j = 0; j < width; ++j) step(states[j], at + j);
                   }
                 }
               });
}

// One scan with an associative f. Groups are scanned by themselves, so that only every eighth step waits for the one
// before.
template <bool kExclusive, class T, class S, class F>
void scan_row(const T* in, T* out, int64_t n, int64_t direction, S carry, F f) {
  constexpr int64_t kGroup = 8;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup, in += kGroup * direction, out += kGroup * direction) {
    S local[kGroup];
    local[0] = static_cast<S>(in[0]);
    for (int64_t k = 1; k < kGroup; ++k) local[k] = f(local[k - 1], static_cast<S>(in[k * direction]));
    if constexpr (kExclusive) out[0] = static_cast<T>(carry);
    for (int64_t k = kExclusive; k < kGroup; ++k) out[k * direction] = static_cast<T>(f(carry, local[k - kExclusive]));
    carry = f(carry, local[kGroup - 1]);
  }
  for (; i < n; ++i, in += direction, out += direction) {
    const S next = f(carry, static_cast<S>(*in));
    *out = static_cast<T>(kExclusive ? carry : next);
    carry = next;
  }
}

template <bool kExclusive, class T, class F>
void scan(const Around& x, bool reverse, const T* in, T* out, State<T> initial, F f) {
  if (x.outer * x.length * x.inner == 0) return;
  if (x.inner == 1) {
    for_rows(x, [&](int64_t at) {
      if (reverse) {
        scan_row<kExclusive>(in + at + x.length - 1, out + at + x.length - 1, x.length, -1, initial, f);
      } else {
        scan_row<kExclusive>(in + at, out + at, x.length, 1, initial, f);
      }
    });
  } else {
    scan_columns(x, reverse, initial, [=](State<T>& state, int64_t at) {
      const State<T> next = f(state, static_cast<State<T>>(in[at]));
      out[at] = static_cast<T>(kExclusive ? state : next);
      state = next;
    });
  }
}

// Calls f(TypeTag<T>{}) for the dtypes that results of scans have.
template <class F>
void visit_scanned(DType dtype, F&& f) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_differentiable(dtype_of<T>) || std::is_same_v<T, int64_t>) f(tag);
  });
}

template <class F>
void scan_with(const char* op, const KernelArgs& args, float initial, F f) {
  const auto& attrs = args.attrs.get<ScanAttrs>();
  const Tensor x = contiguous(args.in[0], args.out[0].dtype());
  const Around parts = around(x.sizes(), normalize_dim(op, attrs.dim, x.dims()));
  visit_scanned(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto start = static_cast<State<T>>(initial);
    if (attrs.exclusive) {
      scan<true>(parts, attrs.reverse, x.data<T>(), args.out[0].data<T>(), start, f);
    } else {
      scan<false>(parts, attrs.reverse, x.data<T>(), args.out[0].data<T>(), start, f);
    }
  });
}

}  // namespace

void cumsum(const KernelArgs& args) { scan_with("cumsum", args, 0, std::plus<>()); }
void cumprod(const KernelArgs& args) { scan_with("cumprod", args, 1, std::multiplies<>()); }

void recurrence(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<ScanAttrs>();
  const Tensor a = contiguous(args.in[0]), b = contiguous(args.in[1]);
  const Around parts = around(a.sizes(), normalize_dim("recurrence", attrs.dim, a.dims()));
  if (a.elems() == 0) return;
  visit_scanned(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* factor = a.data<T>();
    const T* term = b.data<T>();
    T* out = args.out[0].data<T>();
    const auto step = [=](State<T>& state, int64_t at) {
      out[at] = static_cast<T>(state);
      state = static_cast<State<T>>(term[at]) + static_cast<State<T>>(factor[at]) * state;
    };
    if (parts.inner > 1) {
      scan_columns(parts, attrs.reverse, State<T>(0), step);
      return;
    }
    for_rows(parts, [&](int64_t at) {
      State<T> state(0);
      for (int64_t i = 0; i < parts.length; ++i) step(state, at + (attrs.reverse ? parts.length - 1 - i : i));
    });
  });
}

}  // namespace chorale::kernel::cpu
