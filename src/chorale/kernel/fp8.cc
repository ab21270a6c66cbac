#include "chorale/kernel/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace chorale::kernel {
namespace {

struct Format {
  int digits;          // bits behind the point
  int least_exponent;  // of numbers that have all digits
  int most_exponent;
  float most;  // 1.75 * 2^most_exponent in both formats
};
constexpr Format kFormats[] = {{3, -6, 8, 448}, {2, -14, 15, 57344}};
const Format& format_of(Fp8 format) { return kFormats[static_cast<size_t>(format)]; }

constexpr uint8_t kNan = 0x7f, kSign = 0x80;

}  // namespace

Fp8Scale fp8_scale(float largest_magnitude, Fp8 format) {
  constexpr uint32_t kInfinity = 0x7f800000, kDigits = 0x7fffff, kThreeQuarters = 0x600000;
  const auto bits = std::bit_cast<uint32_t>(largest_magnitude) & 0x7fffffff;
  if (bits >= kInfinity) return {1, std::numeric_limits<float>::quiet_NaN()};
  if (bits == 0) return {1, 1};
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const int e = std::min(format_of(format).most_exponent - exponent - ((bits & kDigits) > kThreeQuarters ? 1 : 0), 126);
  return {std::ldexp(1.0f, e), std::ldexp(1.0f, -e)};
}

uint8_t to_fp8(float x, Fp8 format) {
  if (std::isnan(x)) return kNan;
  const Format& f = format_of(format);
  const float magnitude = std::min(std::fabs(x), f.most);
  const uint8_t sign = std::signbit(x) ? kSign : 0;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), f.least_exponent);
  // In units of the last digit. One that rounds up to the next power of two carries into the exponent, as it should.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, f.digits - exponent)));
  return static_cast<uint8_t>(sign | (((exponent - f.least_exponent) << f.digits) + units));
}

float from_fp8(uint8_t byte, Fp8 format) {
  const Format& f = format_of(format);
  const int code = byte & kNan, exponent = code >> f.digits, digits = code & ((1 << f.digits) - 1);
  const float sign = byte & kSign ? -1.0f : 1.0f;
  if (format == Fp8::kE5m2 && exponent == 31)
    return digits == 0 ? sign * std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  if (format == Fp8::kE4m3 && code == kNan) return std::numeric_limits<float>::quiet_NaN();
  const int units = exponent == 0 ? digits : digits + (1 << f.digits);
  return sign * std::ldexp(static_cast<float>(units), std::max(exponent - 1, 0) + f.least_exponent - f.digits);
}

}  // namespace chorale::kernel
