#include "chorale/op/samples.h"

namespace chorale::op {
namespace {

// splitmix64: well mixed from any counter.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t bits(int seed, size_t at) { return mix(mix(static_cast<uint64_t>(seed)) + at); }
double unit(int seed, size_t at) { return static_cast<double>(bits(seed, at) >> 11) * 0x1p-53; }

}  // namespace

Tensor sample(const Shape& sizes, int seed, double low, double high) {
  Tensor x = Tensor::empty(sizes, DType::kF64);
  const auto values = x.span<double>();
  for (size_t i = 0; i < values.size(); ++i) values[i] = low + (high - low) * unit(seed, i);
  return x;
}

Tensor sample_ints(const Shape& sizes, int64_t low, int64_t high, int seed) {
  Tensor x = Tensor::empty(sizes, DType::kI64);
  const auto values = x.span<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = low + static_cast<int64_t>(bits(seed, i) % static_cast<uint64_t>(high - low));
  }
  return x;
}

Tensor sample_bools(const Shape& sizes, int seed) {
  Tensor x = Tensor::empty(sizes, DType::kBool);
  const auto values = x.span<bool>();
  for (size_t i = 0; i < values.size(); ++i) values[i] = bits(seed, i) >> 63;
  return x;
}

Tensor sample_complex(const Shape& sizes, int seed) {
  Tensor x = Tensor::empty(sizes, DType::kC128);
  const auto values = x.span<complex128>();
  for (size_t i = 0; i < values.size(); ++i) values[i] = {4 * unit(seed, 2 * i) - 2, 4 * unit(seed, 2 * i + 1) - 2};
  return x;
}

Tensor sample_stretch(int64_t seed, int64_t offset) { return Tensor::from<int64_t>({seed, offset}, {2}); }

}  // namespace chorale::op
