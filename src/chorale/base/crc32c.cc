#include "chorale/base/crc32c.h"

#include <nmmintrin.h>

#include <cstring>

namespace chorale {

__attribute__((target("sse4.2"))) uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  uint64_t crc = ~before;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    crc = _mm_crc32_u64(crc, word);
  }
  auto narrow = static_cast<uint32_t>(crc);
  for (; left > 0; --left, ++at) narrow = _mm_crc32_u8(narrow, static_cast<uint8_t>(*at));
  return ~narrow;
}

}  // namespace chorale
