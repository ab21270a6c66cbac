#include "chorale/base/crc32c.h"

#include <immintrin.h>

#include <array>
#include <cstring>

#include "chorale/base/crc32c_lanes.h"

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

// Note [Folding] Where the processor multiplies polynomials in wide vectors, 256 bytes are summed at a time, three
// times as fast. Sixteen bytes with a distance of d bits behind them leave the remainder that sixteen others leave,
// which are put onto those at that distance: the products of its halves with x^(d+32) and x^(d-32). (Bits are reversed
// in a CRC, hence the shift by one.) What is left in the end are 16 bytes, summed as any others.
constexpr uint64_t power_of_x(int exponent) {
  uint32_t power = uint32_t{1} << 31;
  for (; exponent > 0; --exponent) power = power & 1 ? power >> 1 ^ 0x82f63b78u : power >> 1;
  return uint64_t{power} << 1;
}
struct Distance {
  uint64_t low, high;
};
constexpr Distance distance(int bits) { return {power_of_x(bits + 32), power_of_x(bits - 32)}; }
constexpr Distance kFourVectors = distance(2048), kVector = distance(512), kThree = distance(384), kTwo = distance(256),
                   kOne = distance(128);
constexpr size_t kFolded = 256;  // bytes

#define CHORALE_FOLDING __attribute__((target("avx512f,avx512vl,pclmul,vpclmulqdq,sse4.2")))

CHORALE_FOLDING __m512i folded(__m512i sum, __m512i by, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00), _mm512_clmulepi64_epi128(sum, by, 0x11),
                                   next, 0x96);  // the exclusive or of all three
}
CHORALE_FOLDING __m512i four_of(Distance d) {
  const auto high = static_cast<int64_t>(d.high), low = static_cast<int64_t>(d.low);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}
CHORALE_FOLDING __m128i moved(__m128i sum, Distance d) {
  const __m128i by = _mm_set_epi64x(static_cast<int64_t>(d.high), static_cast<int64_t>(d.low));
  return _mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11));
}

// Goes on from the register `crc` over a multiple of kFolded bytes, at least one, and returns the register.
CHORALE_FOLDING uint32_t fold(const std::byte* at, size_t bytes, uint32_t crc) {
  __m512i sums[4];
  for (size_t i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(at + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  const __m512i far = four_of(kFourVectors), near = four_of(kVector);
  for (at += kFolded, bytes -= kFolded; bytes > 0; at += kFolded, bytes -= kFolded) {
    for (size_t i = 0; i < 4; ++i) sums[i] = folded(sums[i], far, _mm512_loadu_si512(at + 64 * i));
  }
  __m512i sum = sums[0];
  for (size_t i = 1; i < 4; ++i) sum = folded(sum, near, sums[i]);
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, sum);
  const __m128i last = _mm_xor_si128(_mm_xor_si128(moved(lanes[0], kThree), moved(lanes[1], kTwo)),
                                     _mm_xor_si128(moved(lanes[2], kOne), lanes[3]));
  const uint64_t half = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_extract_epi64(last, 0)));
  return static_cast<uint32_t>(_mm_crc32_u64(half, static_cast<uint64_t>(_mm_extract_epi64(last, 1))));
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("vpclmulqdq");
  return can;
}

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  if (bytes.size() < kFolded || !can_fold()) return crc32c_in_lanes(bytes, before);
  const size_t whole = bytes.size() / kFolded * kFolded;
  return crc32c_in_lanes(bytes.subspan(whole), ~fold(bytes.data(), whole, ~before));
}

__attribute__((target("sse4.2"))) uint32_t crc32c_in_lanes(std::span<const std::byte> bytes, uint32_t before) {
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
