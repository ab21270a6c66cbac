#include "chorale/kernel/cpu/reduce/extremes.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kBlockElems = 32 * 1024;
constexpr int64_t kTileRows = 256, kTileColumns = 16;

template <class T>
auto comparable(T value) {
  if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}

// Does a later element replace an earlier one? NaN wins over everything but an earlier NaN.
template <class T>
bool replaces(T later_element, T earlier_element, bool largest) {
  const auto later = comparable(later_element), earlier = comparable(earlier_element);
  if constexpr (std::is_floating_point_v<decltype(later)>) {
    if (std::isnan(earlier)) return false;
    if (std::isnan(later)) return true;
  }
  return largest ? later > earlier : later < earlier;
}

template <class T>
class Picker {
 public:
  Picker(const T* x, bool largest)
      : x_(x), largest_(largest), pick_(largest ? vec::argmax(dtype_of<T>) : vec::argmin(dtype_of<T>)) {}

  // The index among n > 0 contiguous elements, found in blocks on several threads.
  int64_t flat(int64_t n) const {
    const int64_t blocks = (n + kBlockElems - 1) / kBlockElems;
    if (blocks == 1) return pick_(x_, n);
    std::vector<int64_t> found(static_cast<size_t>(blocks));
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t start = block * kBlockElems;
        found[static_cast<size_t>(block)] = start + pick_(x_ + start, std::min(kBlockElems, n - start));
      }
    });
    int64_t best = found[0];
    for (int64_t candidate : found) {
      if (replaces(x_[candidate], x_[best], largest_)) best = candidate;
    }
    return best;
  }

  // For every position around the dimension, its index along it.
  void along(const Around& x, int64_t* indices) const {
    const int64_t outer = x.outer, n = x.length, inner = x.inner;
    if (inner == 1) {
      parallel_for(outer, (kBlockElems + n - 1) / n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) indices[row] = pick_(x_ + row * n, n);
      });
      return;
    }
    const int64_t tiles = (inner + kTileColumns - 1) / kTileColumns;
    const int64_t tile_elems = n * std::min(inner, kTileColumns);
    parallel_for(outer * tiles, (kBlockElems + tile_elems - 1) / tile_elems, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t row = tile / tiles, column = tile % tiles * kTileColumns;
        pick_columns(x_ + row * n * inner + column, n, inner, std::min(kTileColumns, inner - column),
                     indices + row * inner + column);
      }
    });
  }

 private:
  // Columns of a matrix with rows `stride` elements apart: transposed piece by piece, so that each becomes a row.
  void pick_columns(const T* x, int64_t rows, int64_t stride, int64_t columns, int64_t* indices) const {
    T piece[kTileRows * kTileColumns];
    for (int64_t start = 0; start < rows; start += kTileRows) {
      const int64_t count = std::min(kTileRows, rows - start);
      vec::transpose_copy(x + start * stride, stride * static_cast<int64_t>(sizeof(T)), piece,
                          count * static_cast<int64_t>(sizeof(T)), count, columns, sizeof(T));
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t found = start + pick_(piece + j * count, count);
        if (start == 0 || replaces(x[found * stride + j], x[indices[j] * stride + j], largest_)) indices[j] = found;
      }
    }
  }

  const T* x_;
  bool largest_;
  vec::ArgReduce pick_;
};

// Indices along `dim`, or the one in the flattened tensor; and, where wanted, the elements there.
void pick(const Tensor& from, std::optional<int64_t> dim, bool largest, const Tensor& indices, const Tensor& values) {
  if (indices.elems() == 0) return;
  const Tensor x = contiguous(from);
  visit_dtype(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!is_complex(dtype_of<T>)) {
      const T* data = x.data<T>();
      int64_t* found = indices.data<int64_t>();
      const Picker<T> picker(data, largest);
      if (!dim) {
        *found = picker.flat(x.elems());
        return;
      }
      const Around parts = around(x.sizes(), normalize_dim("pick", *dim, x.dims()));
      picker.along(parts, found);
      if (!values.defined()) return;
      T* value = values.data<T>();
      for (int64_t o = 0; o < parts.outer; ++o, data += parts.length * parts.inner) {
        for (int64_t i = 0; i < parts.inner; ++i) *value++ = data[*found++ * parts.inner + i];
      }
    }
  });
}

void pick_index(const KernelArgs& args, bool largest) {
  const auto& attrs = args.attrs.get<ArgAttrs>();
  pick(args.in[0], attrs.flat ? std::nullopt : std::optional(attrs.dim), largest, args.out[0], {});
}

}  // namespace

void argmax(const KernelArgs& args) { pick_index(args, true); }
void argmin(const KernelArgs& args) { pick_index(args, false); }
void max_with_index(const KernelArgs& args) {
  pick(args.in[0], args.attrs.get<PickAttrs>().dim, true, args.out[1], args.out[0]);
}
void min_with_index(const KernelArgs& args) {
  pick(args.in[0], args.attrs.get<PickAttrs>().dim, false, args.out[1], args.out[0]);
}

}  // namespace chorale::kernel::cpu
