#include "chorale/base/crc32c.h"

#include <nmmintrin.h>

#include <array>
#include <cstring>

namespace chorale {
namespace {

// Note [Three CRCs at a time] The instruction takes 3 cycles and a new one can begin in each: three lanes of kLane
// bytes that lie one behind the other are summed at once. A CRC is linear: that of a lane with kLane bytes behind it is
// the lane's, moved on by as many zero bytes, which is a product with a matrix of bits, and here four looks into
// tables.
constexpr size_t kLane = 4096;

using Columns = std::array<uint32_t, 32>;  // what each bit becomes

uint32_t product(const Columns& matrix, uint32_t bits) {
  uint32_t sum = 0;
  for (size_t i = 0; bits != 0; ++i, bits >>= 1) {
    if (bits & 1) sum ^= matrix[i];
  }
  return sum;
}

struct MoveOn {
  std::array<std::array<uint32_t, 256>, 4> tables;  // by byte of the CRC

  __attribute__((target("sse4.2"))) MoveOn() {
    Columns matrix;
    for (size_t i = 0; i < 32; ++i) matrix[i] = _mm_crc32_u8(uint32_t{1} << i, 0);
    for (size_t bytes = 1; bytes < kLane; bytes *= 2) {
      Columns twice;
      for (size_t i = 0; i < 32; ++i) twice[i] = product(matrix, matrix[i]);
      matrix = twice;
    }
    for (size_t byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value) tables[byte][value] = product(matrix, value << (8 * byte));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^ tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24];
  }
};

uint64_t word_at(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

}  // namespace

__attribute__((target("sse4.2"))) uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  uint64_t crc = ~before;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  if (left >= 3 * kLane) {
    static const MoveOn move_on;
    for (; left >= 3 * kLane; left -= 3 * kLane, at += 3 * kLane) {
      uint64_t second = 0, third = 0;
      for (size_t i = 0; i < kLane; i += 8) {
        crc = _mm_crc32_u64(crc, word_at(at + i));
        second = _mm_crc32_u64(second, word_at(at + kLane + i));
        third = _mm_crc32_u64(third, word_at(at + 2 * kLane + i));
      }
      crc = move_on(move_on(static_cast<uint32_t>(crc)) ^ static_cast<uint32_t>(second)) ^ third;
    }
  }
  for (; left >= 8; left -= 8, at += 8) crc = _mm_crc32_u64(crc, word_at(at));
  auto narrow = static_cast<uint32_t>(crc);
  for (; left > 0; --left, ++at) narrow = _mm_crc32_u8(narrow, static_cast<uint8_t>(*at));
  return ~narrow;
}

}  // namespace chorale
