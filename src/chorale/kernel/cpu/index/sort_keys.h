// Sorting through keys: unsigned integers in the order of the elements, so that one radix sort serves all dtypes. NaN
// comes last, all NaN are equal, and so are both zeros.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu {

template <size_t kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint64_t;
};
template <class T>
using Key = typename UnsignedOf<sizeof(T)>::type;

template <class T>
inline constexpr Key<T> kSignBit = Key<T>(Key<T>(1) << (8 * sizeof(T) - 1));

// The bits of the largest number of a floating type, infinity.
template <class T>
constexpr Key<T> infinity_bits() {
  if constexpr (std::is_same_v<T, float16>) {
    return 0x7c00;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return 0x7f80;
  } else {
    return std::bit_cast<Key<T>>(std::numeric_limits<T>::infinity());
  }
}

template <class T>
inline constexpr bool kHasNan = is_floating(dtype_of<T>);
template <class T>
inline constexpr Key<T> kNanKey = std::numeric_limits<Key<T>>::max();

template <class T>
Key<T> key_of(T value) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof(T));
  if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
    return Key<T>(bits ^ kSignBit<T>);
  } else if constexpr (kHasNan<T>) {
    // -0 becomes 0, negative numbers are in reverse; selections, not branches, since signs cannot be guessed.
    const Key<T> magnitude = Key<T>(bits & ~kSignBit<T>);
    const bool negative = bits != magnitude && magnitude != 0;
    const Key<T> key = Key<T>(magnitude ^ (negative ? std::numeric_limits<Key<T>>::max() >> 1 : kSignBit<T>));
    return magnitude > infinity_bits<T>() ? kNanKey<T> : key;
  } else {
    return bits;
  }
}

template <class K, class Index>
struct Entry {
  K key;
  Index index;
};

// Sorts entries by key and leaves equal keys in their order; `spare` has room for as many. Returns where the result is:
// one of the two.
template <class K, class Index>
Entry<K, Index>* sort_entries(Entry<K, Index>* entries, Entry<K, Index>* spare, size_t n) {
  constexpr size_t kSmall = 128;  // below, comparing is faster than counting
  if (n <= kSmall) {
    std::stable_sort(entries, entries + n, [](const auto& a, const auto& b) { return a.key < b.key; });
    return entries;
  }
  constexpr size_t kDigits = sizeof(K);
  std::array<std::array<size_t, 256>, kDigits> counts{};
  for (size_t i = 0; i < n; ++i) {
    for (size_t digit = 0; digit < kDigits; ++digit) ++counts[digit][entries[i].key >> (8 * digit) & 0xff];
  }
  for (size_t digit = 0; digit < kDigits; ++digit) {
    auto& starts = counts[digit];
    if (starts[entries[0].key >> (8 * digit) & 0xff] == n) continue;  // all the same
    size_t sum = 0;
    for (size_t& start : starts) sum += std::exchange(start, sum);
    for (size_t i = 0; i < n; ++i) spare[starts[entries[i].key >> (8 * digit) & 0xff]++] = entries[i];
    std::swap(entries, spare);
  }
  return entries;
}

}  // namespace chorale::kernel::cpu
