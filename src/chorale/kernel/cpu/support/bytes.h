// Moving bytes with several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "chorale/base/parallel_for.h"

namespace chorale::kernel::cpu {

// Below this many bytes (about 15 us) a second thread costs more than it brings: it has to be woken.
inline constexpr int64_t kBytesGrain = int64_t{1} << 19;

inline void zero_bytes(void* to, int64_t bytes) {
  parallel_for(bytes, kBytesGrain, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<std::byte*>(to) + begin, 0, static_cast<size_t>(end - begin));
  });
}

// How many items of `bytes` each make a piece of parallel_for worth a thread.
inline int64_t items_grain(int64_t bytes) { return bytes > 0 ? (kBytesGrain + bytes - 1) / bytes : kBytesGrain; }

// `rows` rows of `row` bytes, which lie `from_step` and `to_step` bytes apart.
inline void copy_rows(const void* from, int64_t from_step, void* to, int64_t to_step, int64_t row, int64_t rows) {
  if (row == 0) return;
  if (row == from_step && row == to_step) {
    row *= rows;
    rows = 1;
  }
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  // The size of an element as a constant makes the copy one instruction.
  const auto small = [&](auto size) {
    parallel_for(rows, items_grain(row), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::memcpy(target + i * to_step, source + i * from_step, size());
    });
  };
  if (row == 4) return small(std::integral_constant<size_t, 4>{});
  if (row == 8) return small(std::integral_constant<size_t, 8>{});
  // Cut by bytes, so that a few long rows are shared too.
  parallel_for(rows * row, kBytesGrain, [&](int64_t begin, int64_t end) {
    int64_t within = begin % row;
    const std::byte* source_row = source + begin / row * from_step;
    std::byte* target_row = target + begin / row * to_step;
    while (begin < end) {
      const int64_t count = std::min(row - within, end - begin);
      std::memcpy(target_row + within, source_row + within, static_cast<size_t>(count));
      begin += count;
      within = 0;
      source_row += from_step;
      target_row += to_step;
    }
  });
}

}  // namespace chorale::kernel::cpu
