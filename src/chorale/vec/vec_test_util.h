// What the tests of vec share: running under every target, distances in ulp, awkward numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "chorale/vec/target.h"

namespace chorale::vec {

// The loops of one target for the lifetime of the object.
class ForcedTarget {
 public:
  explicit ForcedTarget(const char* name) { force_target(name); }
  ~ForcedTarget() { force_target(nullptr); }
  ForcedTarget(const ForcedTarget&) = delete;
};

// Calls body(name) under each target that this CPU has.
template <class Body>
void for_each_target(Body body) {
  for (const char* name : available_targets()) {
    const ForcedTarget forced(name);
    body(name);
  }
}

// |value - exact| in units of the last place of T at exact; 0 for two NaNs. Infinity counts as the number that would
// follow the largest finite one.
template <class T>
double ulp_distance(T value, long double exact) {
  if (std::isnan(exact) || std::isnan(value)) {
    return std::isnan(exact) && std::isnan(value) ? 0 : std::numeric_limits<double>::infinity();
  }
  using L = std::numeric_limits<T>;
  const long double infinity = std::ldexp(1.0L, L::max_exponent);
  const long double v = std::min(std::max<long double>(value, -infinity), infinity);
  const long double e = std::min(std::max(exact, -infinity), infinity);
  const int exponent =
      std::min(std::max(e == 0 ? L::min_exponent : std::ilogb(e) + 1, L::min_exponent), L::max_exponent);
  return static_cast<double>(std::abs(v - e) / std::ldexp(1.0L, exponent - L::digits));
}

// Zeros, ones, limits, denormals, infinities, NaN, and what makes careless formulas fail.
template <class T>
std::vector<T> awkward() {
  using L = std::numeric_limits<T>;
  std::vector<T> values = {T(0),         T(0.5),       T(1),          T(1.5),   T(2),     T(2.5),
                           T(3),         T(0.1),       T(0.3),        T(0.7),   T(7),     T(20),
                           T(21.5),      T(88.5),      T(89),         T(103.5), T(1e-3),  T(1e-9),
                           T(1e5),       T(1e10),      T(3e7 + 1),    L::min(), L::max(), L::denorm_min(),
                           L::min() / 4, L::epsilon(), L::infinity(), T(1e30)};
  const size_t positive = values.size();
  for (size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
  values.push_back(L::quiet_NaN());
  return values;
}

}  // namespace chorale::vec
