// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random words are a function of
// a key and a counter. Any element of a stream can be computed alone, so numbers depend neither on threads nor on
// order, and a backward pass can draw the same ones again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace chorale {

// Where a stream of random words stands: word i of it is word i % 4 of philox(seed, offset + i / 4).
struct RandomStream {
  uint64_t seed = 0;
  uint64_t offset = 0;  // in blocks of four words

  friend bool operator==(const RandomStream&, const RandomStream&) = default;
};

namespace base {

inline constexpr uint32_t kPhiloxMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr uint32_t kPhiloxKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};
inline constexpr int kPhiloxRounds = 10;

// The upper half of the counter tells unrelated uses of one seed apart.
constexpr std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter, uint64_t counter_high = 0) {
  uint32_t x0 = static_cast<uint32_t>(counter), x1 = static_cast<uint32_t>(counter >> 32);
  uint32_t x2 = static_cast<uint32_t>(counter_high), x3 = static_cast<uint32_t>(counter_high >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMultiplier[0]} * x0;
    const uint64_t p1 = uint64_t{kPhiloxMultiplier[1]} * x2;
    x0 = static_cast<uint32_t>(p1 >> 32) ^ x1 ^ key0;
    x1 = static_cast<uint32_t>(p1);
    x2 = static_cast<uint32_t>(p0 >> 32) ^ x3 ^ key1;
    x3 = static_cast<uint32_t>(p0);
    key0 += kPhiloxKeyStep[0];
    key1 += kPhiloxKeyStep[1];
  }
  return {x0, x1, x2, x3};
}

// Word i of a stream.
constexpr uint32_t random_word(RandomStream stream, uint64_t i) {
  return philox(stream.seed, stream.offset + i / 4)[i % 4];
}

// Uniform in [0, 1) with all the bits that the type has room for.
constexpr float uniform_f32(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }
constexpr double uniform_f64(uint32_t high, uint32_t low) {
  return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
}

}  // namespace base
}  // namespace chorale
