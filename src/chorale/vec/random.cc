#include "chorale/vec/random.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/random.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Blocks counter … counter + blocks. A lane of 64 bits holds one word of a block in its lower half: a product of two
// words then needs no shuffles, and what is above the lower half does no harm until the end.
void philox_blocks(uint64_t seed, uint64_t counter, uint32_t* out, int64_t blocks) {
  const hn::ScalableTag<uint64_t> d64;
  const hn::ScalableTag<uint32_t> d32;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d64));
  const auto set = [&](uint32_t word) { return hn::Set(d64, word); };
  const auto product = [&](auto a, uint32_t multiplier) {
    return hn::MulEven(hn::BitCast(d32, a), hn::BitCast(d32, set(multiplier)));
  };
  const auto low_half = hn::Set(d64, 0xffffffffu);
  int64_t block = 0;
  for (; block + lanes <= blocks; block += lanes) {
    auto x0 = hn::Add(hn::Set(d64, counter + static_cast<uint64_t>(block)), hn::Iota(d64, 0));
    auto x1 = hn::ShiftRight<32>(x0);
    auto x2 = hn::Zero(d64), x3 = hn::Zero(d64);
    auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < base::kPhiloxRounds; ++round) {
      const auto p0 = product(x0, base::kPhiloxMultiplier[0]);
      const auto p1 = product(x2, base::kPhiloxMultiplier[1]);
      x0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), x1), set(key0));
      x1 = p1;
      x2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), x3), set(key1));
      x3 = p0;
      key0 += base::kPhiloxKeyStep[0];
      key1 += base::kPhiloxKeyStep[1];
    }
    const auto first = hn::Or(hn::And(x0, low_half), hn::ShiftLeft<32>(x1));
    const auto second = hn::Or(hn::And(x2, low_half), hn::ShiftLeft<32>(x3));
    hn::StoreInterleaved2(first, second, d64, reinterpret_cast<uint64_t*>(out + 4 * block));
  }
  for (; block < blocks; ++block) {
    const auto words = base::philox(seed, counter + static_cast<uint64_t>(block));
    for (size_t w = 0; w < 4; ++w) out[4 * block + static_cast<int64_t>(w)] = words[w];
  }
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {

HWY_EXPORT(philox_blocks);

void random_words(RandomStream stream, uint64_t first, uint32_t* out, int64_t n) {
  int64_t i = 0;
  // Up to the next whole block, whole blocks, the rest.
  for (; i < n && (first + static_cast<uint64_t>(i)) % 4 != 0; ++i) {
    out[i] = base::random_word(stream, first + static_cast<uint64_t>(i));
  }
  const int64_t blocks = (n - i) / 4;
  HWY_DYNAMIC_DISPATCH(philox_blocks)
  (stream.seed, stream.offset + (first + static_cast<uint64_t>(i)) / 4, out + i, blocks);
  for (i += 4 * blocks; i < n; ++i) out[i] = base::random_word(stream, first + static_cast<uint64_t>(i));
}

}  // namespace chorale::vec
#endif
