// Moving elements without looking at them. No dispatch: these wait for memory, and SSE2 is enough to keep it busy.
#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "chorale/vec/loops.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::vec {
namespace {

template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

const std::byte* offset(const void* base, int64_t bytes) { return static_cast<const std::byte*>(base) + bytes; }
std::byte* offset(void* base, int64_t bytes) { return static_cast<std::byte*>(base) + bytes; }

// `stride` is an int64_t, or a constant that lets the compiler use shuffles.
template <class T, class Stride>
void gather(const void* in, Stride stride, void* out, int64_t n) {
  T* __restrict to = static_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) to[i] = load<T>(offset(in, i * stride));
}
template <class T, class Stride>
void scatter(const void* in, void* out, Stride stride, int64_t n) {
  const T* __restrict from = static_cast<const T*>(in);
  for (int64_t i = 0; i < n; ++i) store(offset(out, i * stride), from[i]);
}

// ---- transposing. A block has the width of a cache line both ways, so every line is read and written whole, once.

constexpr int64_t kLineBytes = 64;

template <size_t kElem>
__m128i interleave_low(__m128i a, __m128i b) {
  if constexpr (kElem == 1) return _mm_unpacklo_epi8(a, b);
  if constexpr (kElem == 2) return _mm_unpacklo_epi16(a, b);
  if constexpr (kElem == 4) return _mm_unpacklo_epi32(a, b);
  return _mm_unpacklo_epi64(a, b);
}
template <size_t kElem>
__m128i interleave_high(__m128i a, __m128i b) {
  if constexpr (kElem == 1) return _mm_unpackhi_epi8(a, b);
  if constexpr (kElem == 2) return _mm_unpackhi_epi16(a, b);
  if constexpr (kElem == 4) return _mm_unpackhi_epi32(a, b);
  return _mm_unpackhi_epi64(a, b);
}

// A square of 16-byte rows. Interleaving the upper half of the rows with the lower half is a perfect shuffle of the
// whole square; log2(rows) shuffles transpose it.
template <size_t kElem>
inline void transpose_square(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride) {
  constexpr int64_t kRows = 16 / kElem;
  __m128i rows[kRows];
  for (int64_t r = 0; r < kRows; ++r) rows[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + r * in_stride));
  for (int64_t step = 1; step < kRows; step *= 2) {
    __m128i shuffled[kRows];
    for (int64_t r = 0; r < kRows / 2; ++r) {
      shuffled[2 * r] = interleave_low<kElem>(rows[r], rows[r + kRows / 2]);
      shuffled[2 * r + 1] = interleave_high<kElem>(rows[r], rows[r + kRows / 2]);
    }
    std::copy_n(shuffled, kRows, rows);
  }
  for (int64_t r = 0; r < kRows; ++r) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + r * out_stride), rows[r]);
}

template <class T>
void transpose_any(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride, int64_t rows,
                   int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      store(out + c * out_stride + r * int64_t{sizeof(T)}, load<T>(in + r * in_stride + c * int64_t{sizeof(T)}));
    }
  }
}

template <class T>
void transpose_squares(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride) {
  constexpr int64_t kElem = sizeof(T);
  constexpr int64_t kBlock = kLineBytes / kElem, kSquare = 16 / kElem;
  // Columns outermost: the four stores to one line of the result follow each other.
  for (int64_t c = 0; c < kBlock; c += kSquare) {
    for (int64_t r = 0; r < kBlock; r += kSquare) {
      transpose_square<kElem>(in + r * in_stride + c * kElem, in_stride, out + c * out_stride + r * kElem, out_stride);
    }
  }
}

template <class T>
void transpose_block(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride) {
  constexpr int64_t kElem = sizeof(T);
  constexpr int64_t kBlock = kLineBytes / kElem;
  if constexpr (kElem == 16) {
    transpose_any<T>(in, in_stride, out, out_stride, kBlock, kBlock);
  } else if constexpr (kElem >= 4) {
    transpose_squares<T>(in, in_stride, out, out_stride);
  } else {
    // So many rows, if they lie a power of two apart, would push each other out of the cache before the next square
    // needs them: lines are copied whole to and from the stack (measured: twice as fast at 4096 x 4096).
    alignas(64) std::byte from[kBlock * kLineBytes], to[kBlock * kLineBytes];
    for (int64_t r = 0; r < kBlock; ++r) std::memcpy(from + r * kLineBytes, in + r * in_stride, kLineBytes);
    transpose_squares<T>(from, kLineBytes, to, kLineBytes);
    for (int64_t c = 0; c < kBlock; ++c) std::memcpy(out + c * out_stride, to + c * kLineBytes, kLineBytes);
  }
}

template <class T>
void transpose(const std::byte* in, int64_t in_stride, std::byte* out, int64_t out_stride, int64_t rows, int64_t cols) {
  constexpr int64_t kElem = sizeof(T);
  constexpr int64_t kBlock = kLineBytes / kElem;
  // Tiles of blocks, so that the pages touched on both sides stay known to the CPU.
  constexpr int64_t kTile = 16 * kBlock;
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      for (int64_t r = r0; r < std::min(r0 + kTile, rows); r += kBlock) {
        for (int64_t c = c0; c < std::min(c0 + kTile, cols); c += kBlock) {
          const std::byte* from = in + r * in_stride + c * kElem;
          std::byte* to = out + c * out_stride + r * kElem;
          if (r + kBlock <= rows && c + kBlock <= cols) {
            transpose_block<T>(from, in_stride, to, out_stride);
          } else {
            transpose_any<T>(from, in_stride, to, out_stride, std::min(kBlock, rows - r), std::min(kBlock, cols - c));
          }
        }
      }
    }
  }
}

}  // namespace

void fill(void* out, const void* value, size_t elem, int64_t n) {
  visit_bytes(elem, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T v = load<T>(value);
    if constexpr (sizeof(T) == 1) {
      std::memset(out, v, static_cast<size_t>(n));
    } else {
      T* to = static_cast<T*>(out);
      for (int64_t i = 0; i < n; ++i) to[i] = v;
    }
  });
}

void gather_strided(const void* in, int64_t stride_bytes, void* out, int64_t n, size_t elem) {
  const auto size = static_cast<int64_t>(elem);
  if (n <= 0) return;
  if (stride_bytes == size) {
    std::memcpy(out, in, static_cast<size_t>(n * size));
  } else if (stride_bytes == 0) {
    fill(out, in, elem, n);
  } else {
    visit_bytes(elem, [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr int64_t kSize = sizeof(T);
      if (stride_bytes == 2 * kSize) {
        gather<T>(in, std::integral_constant<int64_t, 2 * kSize>(), out, n);
      } else if (stride_bytes == -kSize) {
        gather<T>(in, std::integral_constant<int64_t, -kSize>(), out, n);
      } else {
        gather<T>(in, stride_bytes, out, n);
      }
    });
  }
}

void scatter_strided(const void* in, void* out, int64_t stride_bytes, int64_t n, size_t elem) {
  const auto size = static_cast<int64_t>(elem);
  if (n <= 0) return;
  if (stride_bytes == size) {
    std::memcpy(out, in, static_cast<size_t>(n * size));
  } else {
    visit_bytes(elem, [&](auto tag) { scatter<typename decltype(tag)::type>(in, out, stride_bytes, n); });
  }
}

void transpose_copy(const void* in, int64_t in_row_stride, void* out, int64_t out_row_stride, int64_t rows,
                    int64_t cols, size_t elem) {
  visit_bytes(elem, [&](auto tag) {
    transpose<typename decltype(tag)::type>(offset(in, 0), in_row_stride, offset(out, 0), out_row_stride, rows, cols);
  });
}

}  // namespace chorale::vec
