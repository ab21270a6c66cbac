#include "chorale/kernel/cpu/scan.h"

#include <algorithm>
#include <type_traits>

#include "chorale/base/parallel.h"
#include "chorale/kernel/cpu/copy.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;
constexpr int64_t kColumns = 128;  // states kept at a time
constexpr int64_t kRows = 4;       // rows advanced together: each step waits for the one before it in its row

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
struct StateOf<int64_t> {
  using type = uint64_t;  // wraps around
};
template <class T>
using State = typename StateOf<T>::type;

// step(state, offset) for every element, along the dimension in the middle; states start as `initial`.
template <class S, class Step>
void scan(const AroundDim& x, bool reverse, S initial, Step&& step) {
  const auto [outer, n, inner] = x;
  if (outer * n * inner == 0) return;
  // `width` neighbouring scans, `apart` elements from one to the next; their elements are `inner` apart.
  const auto advance = [n = n, inner = inner, reverse, initial, &step]<int64_t kFixed>(
                           std::integral_constant<int64_t, kFixed>, int64_t base, int64_t width, int64_t apart) {
    S states[kFixed ? kFixed : kColumns];
    if constexpr (kFixed) width = kFixed;
    std::fill_n(states, width, initial);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = base + (reverse ? n - 1 - i : i) * inner;
      for (int64_t j = 0; j < width; ++j) step(states[j], at + j * apart);
    }
  };
  const auto one = std::integral_constant<int64_t, 1>{};
  const auto many = std::integral_constant<int64_t, 0>{};
  if (inner == 1) {
    parallel_for(outer, (kGrainElems + n - 1) / n, [&](int64_t begin, int64_t end) {
      for (; begin + kRows <= end; begin += kRows) {
        advance(std::integral_constant<int64_t, kRows>{}, begin * n, kRows, n);
      }
      for (; begin < end; ++begin) advance(one, begin * n, 1, 1);
    });
    return;
  }
  const int64_t tiles = (inner + kColumns - 1) / kColumns;
  const int64_t tile_elems = n * std::min(inner, kColumns);
  parallel_for(outer * tiles, (kGrainElems + tile_elems - 1) / tile_elems, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const int64_t column = begin % tiles * kColumns;
      advance(many, begin / tiles * n * inner + column, std::min(kColumns, inner - column), 1);
    }
  });
}

// Calls f(TypeTag<T>{}) for the dtypes that results of scans have.
template <class F>
void visit_scanned(DType dtype, F&& f) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_differentiable(dtype_of<T>) || std::is_same_v<T, int64_t>) f(tag);
  });
}

}  // namespace

void cumsum(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<ScanAttrs>();
  const Tensor x = contiguous(args.in[0], args.out[0].dtype());
  const AroundDim around = around_dim(x.sizes(), normalize_dim("cumsum", attrs.dim, x.rank()));
  visit_scanned(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = x.data<T>();
    T* out = args.out[0].data<T>();
    if (attrs.exclusive) {
      scan(around, attrs.reverse, State<T>(0), [=](State<T>& state, int64_t at) {
        out[at] = static_cast<T>(state);
        state += static_cast<State<T>>(in[at]);
      });
    } else {
      scan(around, attrs.reverse, State<T>(0), [=](State<T>& state, int64_t at) {
        state += static_cast<State<T>>(in[at]);
        out[at] = static_cast<T>(state);
      });
    }
  });
}

void cumprod(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<ScanAttrs>();
  const Tensor x = contiguous(args.in[0], args.out[0].dtype());
  const AroundDim around = around_dim(x.sizes(), normalize_dim("cumprod", attrs.dim, x.rank()));
  visit_scanned(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = x.data<T>();
    T* out = args.out[0].data<T>();
    if (attrs.exclusive) {
      scan(around, attrs.reverse, State<T>(1), [=](State<T>& state, int64_t at) {
        out[at] = static_cast<T>(state);
        state *= static_cast<State<T>>(in[at]);
      });
    } else {
      scan(around, attrs.reverse, State<T>(1), [=](State<T>& state, int64_t at) {
        state *= static_cast<State<T>>(in[at]);
        out[at] = static_cast<T>(state);
      });
    }
  });
}

void recurrence(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<ScanAttrs>();
  const Tensor a = contiguous(args.in[0]), b = contiguous(args.in[1]);
  const AroundDim around = around_dim(a.sizes(), normalize_dim("recurrence", attrs.dim, a.rank()));
  visit_scanned(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* factor = a.data<T>();
    const T* term = b.data<T>();
    T* out = args.out[0].data<T>();
    scan(around, attrs.reverse, State<T>(0), [=](State<T>& state, int64_t at) {
      out[at] = static_cast<T>(state);
      state = static_cast<State<T>>(term[at]) + static_cast<State<T>>(factor[at]) * state;
    });
  });
}

}  // namespace chorale::kernel::cpu
