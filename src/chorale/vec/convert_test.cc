#include <gtest/gtest.h>

#include <cstring>

#include "chorale/vec/loops.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

template <class From, class To>
std::vector<To> converted(const std::vector<From>& in) {
  std::vector<To> out(in.size());
  convert_loop(dtype_of<From>, dtype_of<To>)(in.data(), out.data(), static_cast<int64_t>(in.size()));
  return out;
}

template <class Half>
std::vector<Half> all_halves() {
  std::vector<Half> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  return values;
}

template <class Half>
void test_every_half() {
  const std::vector<Half> halves = all_halves<Half>();
  for_each_target([&](const char* target) {
    const std::vector<float> floats = converted<Half, float>(halves);
    const std::vector<Half> back = converted<float, Half>(floats);
    for (size_t i = 0; i < halves.size(); ++i) {
      const float expected = static_cast<float>(halves[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << target << " " << i;
        ASSERT_TRUE(std::isnan(static_cast<float>(back[i]))) << target << " " << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), std::bit_cast<uint32_t>(expected)) << target << " " << i;
        ASSERT_EQ(back[i].bits, halves[i].bits) << target;
      }
    }
  });
}
TEST(Convert, EveryF16GoesToF32AndBack) { test_every_half<float16>(); }
TEST(Convert, EveryBF16GoesToF32AndBack) { test_every_half<bfloat16>(); }

// Values on, just above and just below every rounding boundary between neighbours.
template <class Half>
void test_rounding() {
  std::vector<float> floats;
  for (Half half : all_halves<Half>()) {
    const float x = static_cast<float>(half);
    Half next_half = half;
    ++next_half.bits;
    const float next = static_cast<float>(next_half);
    if (!std::isfinite(x)) continue;
    const float middle = std::isfinite(next) ? x / 2 + next / 2 : x * 1.001f;
    for (float y : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, x + x)}) floats.push_back(y);
  }
  for (float x : awkward<float>()) floats.push_back(x);
  for_each_target([&](const char* target) {
    const std::vector<Half> out = converted<float, Half>(floats);
    for (size_t i = 0; i < floats.size(); ++i) {
      const Half expected(floats[i]);
      ASSERT_EQ(out[i].bits, expected.bits) << target << " " << floats[i];
    }
  });
}
TEST(Convert, F32RoundsToF16LikeTheScalarType) { test_rounding<float16>(); }
TEST(Convert, F32RoundsToBF16LikeTheScalarType) { test_rounding<bfloat16>(); }

// One element, by the rules of loops.h.
template <class To, class From>
To reference(From x) {
  constexpr bool kFromHalf = std::is_same_v<From, float16> || std::is_same_v<From, bfloat16>;
  constexpr bool kToHalf = std::is_same_v<To, float16> || std::is_same_v<To, bfloat16>;
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (kFromHalf) {
    return reference<To>(static_cast<float>(x));
  } else if constexpr (requires { x.real(); }) {
    if constexpr (requires { To().real(); }) {
      return To(reference<typename To::value_type>(x.real()), reference<typename To::value_type>(x.imag()));
    } else if constexpr (std::is_same_v<To, bool>) {
      return x.real() != 0 || x.imag() != 0;
    } else {
      return reference<To>(x.real());
    }
  } else if constexpr (requires { To().real(); }) {
    return To(reference<typename To::value_type>(x), 0);
  } else if constexpr (kToHalf) {
    return To(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, bool>) {
    return x != 0;
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    using Wide = std::conditional_t<sizeof(To) == 8, int64_t, int32_t>;
    const double limit = std::ldexp(1.0, 8 * static_cast<int>(sizeof(Wide)) - 1);
    const double y = std::trunc(static_cast<double>(x));
    const bool fits = y >= -limit && y < limit;
    return static_cast<To>(fits ? static_cast<Wide>(y) : std::numeric_limits<Wide>::min());
  } else {
    return static_cast<To>(x);
  }
}

template <class T>
std::vector<T> samples() {
  std::vector<T> values;
  const std::vector<double> reals = {
      0,   -0.0, 1,     -1,     0.5,  -0.5,  1.5, 2.5,  -3.5, 100,      127,          128,          255,
      256, -128, -129,  300.7,  3e4,  40000, 7e4, -7e4, 1e-8, 16777217, 2147483647.0, 2147483648.0, -2147483648.0,
      3e9, 1e18, -1e18, 9.3e18, 1e30, -1e30};
  for (int repeat = 0; repeat < 40; ++repeat) {
    for (double x : reals) {
      if constexpr (std::is_same_v<T, bool>) {
        values.push_back(x != 0);
      } else if constexpr (std::is_integral_v<T>) {
        values.push_back(static_cast<T>(static_cast<int64_t>(std::min(x, 9e18))));
      } else if constexpr (requires { T().real(); }) {
        values.push_back(T(static_cast<typename T::value_type>(x), static_cast<typename T::value_type>(repeat - 3)));
      } else if constexpr (std::is_floating_point_v<T>) {
        values.push_back(static_cast<T>(x));
      } else {
        values.push_back(T(static_cast<float>(x)));
      }
    }
  }
  if constexpr (std::is_floating_point_v<T>) {
    for (T x : awkward<T>()) values.push_back(x);
  }
  return values;
}

// vector<bool> has no bytes of its own.
template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = values[i];
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

template <class From, class To>
void test_pair(const char* target) {
  const std::vector<From> in = samples<From>();
  std::vector<To> expected;
  for (const From x : in) expected.push_back(reference<To>(x));
  const std::vector<uint8_t> in_bytes = bytes_of(in), expected_bytes = bytes_of(expected);
  for (size_t n : {size_t{0}, size_t{1}, size_t{3}, size_t{17}, in.size()}) {
    std::vector<uint8_t> out((n + 4) * sizeof(To), 0xa5);
    convert_loop(dtype_of<From>, dtype_of<To>)(in_bytes.data(), out.data(), static_cast<int64_t>(n));
    for (size_t i = 0; i < n * sizeof(To); i += sizeof(To)) {
      To got;
      std::memcpy(&got, out.data() + i, sizeof(To));
      const To want = expected[i / sizeof(To)];
      const bool both_nan = got != got && want != want;
      ASSERT_TRUE(both_nan || std::memcmp(out.data() + i, expected_bytes.data() + i, sizeof(To)) == 0)
          << target << " " << dtype_of<From> << " to " << dtype_of<To> << ", element " << i / sizeof(To);
    }
    for (size_t i = n * sizeof(To); i < out.size(); ++i) ASSERT_EQ(out[i], 0xa5);
  }
}

TEST(Convert, AllPairsFollowTheRules) {
  for_each_target([](const char* target) {
    for (DType from : kAllDTypes) {
      for (DType to : kAllDTypes) {
        visit_dtype(from, [&](auto from_tag) {
          visit_dtype(to, [&](auto to_tag) {
            test_pair<typename decltype(from_tag)::type, typename decltype(to_tag)::type>(target);
          });
        });
      }
    }
  });
}

TEST(Convert, InPlaceWhereSizesAgree) {
  for_each_target([](const char*) {
    std::vector<float> values = {1.5f, -2.5f, 3e9f};
    for (int i = 0; i < 100; ++i) values.push_back(static_cast<float>(i));
    std::vector<int32_t> expected = converted<float, int32_t>(values);
    convert_loop(DType::kF32, DType::kI32)(values.data(), values.data(), static_cast<int64_t>(values.size()));
    EXPECT_EQ(std::memcmp(values.data(), expected.data(), values.size() * 4), 0);
  });
}

}  // namespace
}  // namespace chorale::vec
