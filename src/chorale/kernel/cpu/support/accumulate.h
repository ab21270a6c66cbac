// The type in which elements of T are summed by kernels that add a few at a time.
#pragma once

#include <concepts>
#include <type_traits>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu {

namespace detail {
template <class T>
struct SumOf {
  using type = T;
};
template <>
struct SumOf<float16> {
  using type = float;
};
template <>
struct SumOf<bfloat16> {
  using type = float;
};
// Integers wrap around, which only unsigned ones may do; bool becomes true when anything is.
template <std::integral T>
struct SumOf<T> {
  using type = uint64_t;
};
}  // namespace detail

template <class T>
using Sum = typename detail::SumOf<T>::type;

template <class T>
Sum<T> to_sum(T value) {
  return static_cast<Sum<T>>(value);
}
template <class T>
T from_sum(Sum<T> sum) {
  if constexpr (std::is_same_v<T, bool>) {
    return sum != 0;
  } else {
    return static_cast<T>(sum);
  }
}

}  // namespace chorale::kernel::cpu
