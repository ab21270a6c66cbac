#include "chorale/vec/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/vec/loops.h"

namespace chorale::vec {
namespace {

// Elements that go through a buffer at a time: with 16 bytes each, two buffers stay inside the first-level cache.
constexpr int64_t kChunk = 1024;
// Below this much work another thread costs more than it saves.
constexpr int64_t kGrain = 32 * 1024;
// Rows at least this long are copied directly; shorter ones are collected in a buffer first.
constexpr int64_t kLongRowBytes = 256;
// Edges of the squares that are transposed at a time, directly and through a buffer in which they are then converted.
constexpr int64_t kTile = 128, kConvertedTile = 64;

struct Buffer {
  alignas(64) std::byte bytes[kChunk * 16];
};

constexpr size_t kTo = 0, kFrom = 1;

// Both sides are contiguous.
void copy_linear(const StridedOperand& from, const StridedOperand& to, int64_t elems, int64_t grain) {
  const Convert convert = convert_loop(from.dtype, to.dtype);
  parallel_for(elems, grain, [&](int64_t begin, int64_t end) {
    const std::byte* source = from.data + begin * static_cast<int64_t>(from.elem_bytes);
    std::byte* target = to.data + begin * static_cast<int64_t>(to.elem_bytes);
    if (from.dtype == to.dtype) {
      std::memcpy(target, source, static_cast<size_t>(end - begin) * to.elem_bytes);
    } else {
      convert(source, target, end - begin);
    }
  });
}

// Contiguous along the innermost dimension.
void copy_rows(const StridedSpace& space, int64_t grain) {
  const StridedOperand &from = space[kFrom], &to = space[kTo];
  const Convert convert = convert_loop(from.dtype, to.dtype);
  parallel_for(space.elems(), grain, [&](int64_t begin, int64_t end) {
    space.for_each_row(begin, end, [&](std::byte* const* data, int64_t n) {
      if (from.dtype == to.dtype) {
        std::memcpy(data[kTo], data[kFrom], static_cast<size_t>(n) * to.elem_bytes);
      } else {
        convert(data[kFrom], data[kTo], n);
      }
    });
  });
}

// The general case, a chunk at a time: gather, convert, scatter, each only where needed.
void copy_chunks(const StridedSpace& space, int64_t grain) {
  const StridedOperand &from = space[kFrom], &to = space[kTo];
  const bool same_dtype = from.dtype == to.dtype;
  const Convert convert = convert_loop(from.dtype, to.dtype);
  parallel_for(space.elems(), grain, [&](int64_t first, int64_t end) {
    Buffer gathered, converted;
    for (int64_t begin = first; begin < end; begin += kChunk) {
      const int64_t n = std::min(kChunk, end - begin);
      std::byte* target = to.linear ? to.data + begin * static_cast<int64_t>(to.elem_bytes) : nullptr;
      const std::byte* source = from.linear ? from.data + begin * static_cast<int64_t>(from.elem_bytes) : nullptr;
      if (!source) {
        std::byte* collected = target && same_dtype ? target : gathered.bytes;
        space.gather(kFrom, begin, n, collected);
        source = collected;
      }
      if (!same_dtype) {
        std::byte* result = target ? target : converted.bytes;
        convert(source, result, n);
        source = result;
      }
      if (!target) space.scatter(kTo, begin, n, source);
    }
  });
}

// The dimension along which the source is contiguous where it is not the one along which the target is, or -1.
int transposed_dimension(const StridedSpace& space) {
  const StridedOperand &from = space[kFrom], &to = space[kTo];
  const int inner = space.dims() - 1;
  if (to.strides[inner] != static_cast<int64_t>(to.elem_bytes) || space.inner() < 4) return -1;
  for (int i = 0; i < inner; ++i) {
    if (from.strides[i] == static_cast<int64_t>(from.elem_bytes) && space.size(i) >= 4) return i;
  }
  return -1;
}

// Squares along `dim`, in which the source is contiguous, and the innermost dimension, in which the target is: either
// side touches whole cache lines.
void copy_transposed(const StridedSpace& space, int dim, int64_t grain) {
  const StridedOperand &from = space[kFrom], &to = space[kTo];
  const int inner = space.dims() - 1;
  const bool same_dtype = from.dtype == to.dtype;
  const Convert convert = convert_loop(from.dtype, to.dtype);
  const int64_t edge = same_dtype ? kTile : kConvertedTile;
  const int64_t tiles_along = (space.size(dim) + edge - 1) / edge, tiles_inner = (space.inner() + edge - 1) / edge;
  const int64_t tiles = space.elems() / (space.size(dim) * space.inner()) * tiles_along * tiles_inner;
  parallel_for(tiles, grain / (edge * edge), [&](int64_t begin, int64_t end) {
    alignas(64) std::byte buffer[kConvertedTile * kConvertedTile * 16];
    for (int64_t tile = begin; tile < end; ++tile) {
      // Tiles along `dim` follow one another fastest: the target's rows stay in reach, the source is read
      // in order.
      int64_t rest = tile;
      const int64_t i = rest % tiles_along * edge;
      rest /= tiles_along;
      const int64_t j = rest % tiles_inner * edge;
      rest /= tiles_inner;
      const std::byte* source = from.data + i * from.strides[dim] + j * from.strides[inner];
      std::byte* target = to.data + i * to.strides[dim] + j * to.strides[inner];
      for (int d = inner; d-- > 0;) {
        if (d == dim) continue;
        source += rest % space.size(d) * from.strides[d];
        target += rest % space.size(d) * to.strides[d];
        rest /= space.size(d);
      }
      const int64_t rows = std::min(edge, space.inner() - j), cols = std::min(edge, space.size(dim) - i);
      if (same_dtype) {
        transpose_copy(source, from.strides[inner], target, to.strides[dim], rows, cols, to.elem_bytes);
        continue;
      }
      const int64_t row_bytes = rows * static_cast<int64_t>(from.elem_bytes);
      transpose_copy(source, from.strides[inner], buffer, row_bytes, rows, cols, from.elem_bytes);
      for (int64_t c = 0; c < cols; ++c) convert(buffer + c * row_bytes, target + c * to.strides[dim], rows);
    }
  });
}

// A grain so large that nothing is cut into pieces.
constexpr int64_t kWhole = int64_t{1} << 60;
int64_t grain_of(Threads threads) { return threads == Threads::kOne ? kWhole : kGrain; }

bool is_same(const StridedView& a, const StridedView& b) {
  return a.data == b.data && a.dtype == b.dtype &&
         std::equal(a.strides.begin(), a.strides.end(), b.strides.begin(), b.strides.end());
}

bool is_empty(const StridedView& view) {
  return std::find(view.sizes.begin(), view.sizes.end(), 0) != view.sizes.end();
}

}  // namespace

void copy_strided(const StridedView& from, const StridedView& to, Threads threads) {
  CHORALE_INVARIANT(std::equal(from.sizes.begin(), from.sizes.end(), to.sizes.begin(), to.sizes.end()),
                    "copy between different sizes");
  if (is_empty(to) || is_same(from, to)) return;
  const int64_t grain = grain_of(threads);
  const StridedSpace space(to, {&from, 1});
  const StridedOperand &source = space[kFrom], &target = space[kTo];
  const auto contiguous_rows = [&](const StridedOperand& x) {
    return x.inner_stride(space.dims()) == static_cast<int64_t>(x.elem_bytes);
  };
  if (source.linear && target.linear) {
    copy_linear(source, target, space.elems(), grain);
  } else if (contiguous_rows(source) && contiguous_rows(target) &&
             space.inner() * static_cast<int64_t>(target.elem_bytes) >= kLongRowBytes) {
    copy_rows(space, grain);
  } else if (const int dim = transposed_dimension(space); dim >= 0) {
    copy_transposed(space, dim, grain);
  } else {
    copy_chunks(space, grain);
  }
}

void fill_strided(const void* value, const StridedView& view, Threads threads) {
  if (is_empty(view)) return;
  const int64_t grain = grain_of(threads);
  const StridedSpace space(view, {});
  const StridedOperand& to = space[kTo];
  const auto elem = static_cast<int64_t>(to.elem_bytes);
  parallel_for(space.elems(), grain, [&](int64_t begin, int64_t end) {
    if (to.linear) return fill(to.data + begin * elem, value, to.elem_bytes, end - begin);
    space.for_each_row(begin, end, [&](std::byte* const* data, int64_t n) {
      const int64_t stride = to.inner_stride(space.dims());
      if (stride == elem) return fill(data[kTo], value, to.elem_bytes, n);
      for (int64_t i = 0; i < n; ++i) std::memcpy(data[kTo] + i * stride, value, to.elem_bytes);
    });
  });
}

}  // namespace chorale::vec
