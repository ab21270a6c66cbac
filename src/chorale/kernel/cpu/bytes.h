// Moving bytes with several threads.
#pragma once

#include <cstddef>
#include <cstring>

#include "chorale/base/parallel.h"

namespace chorale::kernel::cpu {

// Below this many bytes a second thread costs more than it brings.
inline constexpr int64_t kBytesGrain = int64_t{1} << 17;

inline void zero_bytes(void* to, int64_t bytes) {
  parallel_for(bytes, kBytesGrain, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<std::byte*>(to) + begin, 0, static_cast<size_t>(end - begin));
  });
}

// How many items of `bytes` each make a piece of parallel_for worth a thread.
inline int64_t items_grain(int64_t bytes) { return bytes > 0 ? (kBytesGrain + bytes - 1) / bytes : kBytesGrain; }

}  // namespace chorale::kernel::cpu
