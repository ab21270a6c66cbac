// The two 16-bit floating types as storage: bits with conversions to and from float. Arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>

namespace chorale {

// Brain float: the upper half of a float. Rounds to nearest even; NaN stays NaN.
struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;
  explicit bfloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  friend bool operator==(bfloat16 a, bfloat16 b) { return static_cast<float>(a) == static_cast<float>(b); }
};

// IEEE 754 binary16. Rounds to nearest even, keeps denormals, infinities and NaN.
struct float16 {
  uint16_t bits = 0;

  float16() = default;
  explicit float16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN keeps the top of its payload
    } else if (magnitude >= 0x477ff000u) {
      result = 0x7c00u;  // rounds to infinity
    } else if (magnitude < 0x38800000u) {
      // Denormal result: adding a power of two whose last place is 2^-24 rounds for us.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      result = std::bit_cast<uint32_t>(shifted) - 0x3f000000u;
    } else {
      result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = static_cast<uint16_t>(sign | result);
  }
  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
    const float denormal = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(denormal));
  }
  friend bool operator==(float16 a, float16 b) { return static_cast<float>(a) == static_cast<float>(b); }
};

}  // namespace chorale
