// Numbers of 8 bits, as GPUs from Ada on multiply them, in software: for rows on the CPU, and for tests.
#pragma once

#include <cstdint>

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// How a byte is cut behind its sign: e4m3 (up to 448) for values, e5m2 (up to 57,344) for gradients, which need range
// more than digits.
enum class Fp8 : uint8_t { kE4m3, kE5m2 };

// Note [Scales of 8 bits]. A tensor is multiplied by a power of two before it is cast, the largest one with which its
// largest element still fits, and the product by the powers' inverses. These are formats with an exponent of their own:
// a power of two loses a digit only of numbers below 2^-13 (2^-28) of the largest one, and it is exact, so that a
// number is rounded once, and small integers not at all. The power is found anew for each tensor, in a pass over it
// ("current scaling"). A power from earlier steps ("delayed scaling") would save that pass; but then it would be state
// of each layer, which checkpoints, ranks and recorded steps have to know of, and a gradient that jumps would be cut
// off. A tensor with an infinity or a NaN has the scale NaN, so that all of a product with it is NaN: a loss scaler
// sees it.
struct Fp8Scale {
  float up, down;  // 2^e and 2^-e
};
Fp8Scale fp8_scale(float largest_magnitude, Fp8 format);

// The nearest number, ties to even; what is too large becomes the largest one.
uint8_t to_fp8(float x, Fp8 format);
float from_fp8(uint8_t byte, Fp8 format);

struct Fp8LinearAttrs {
  bool in_first = false;  // the weight is [in, out]
};
CHORALE_FIELDS(Fp8LinearAttrs, in_first)

}  // namespace chorale::kernel
