#include "chorale/base/cpu.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace chorale {
namespace {

enum Register : uint8_t { kEax, kEbx, kEcx, kEdx };
// The parts of the state that the operating system must save for a feature: bits of XCR0.
constexpr uint64_t kXmm = 0x2;
constexpr uint64_t kYmm = 0x6;
constexpr uint64_t kZmm = 0xe6;
constexpr uint64_t kTiles = 0x60000;

struct Row {
  CpuFeature feature;
  std::string_view name;
  uint32_t leaf, subleaf;  // of CPUID
  Register reg;
  int bit;
  uint64_t state;
};
constexpr Row kRows[] = {
    {CpuFeature::kSse42, "sse4_2", 1, 0, kEcx, 20, kXmm},
    {CpuFeature::kAvx, "avx", 1, 0, kEcx, 28, kYmm},
    {CpuFeature::kAvx2, "avx2", 7, 0, kEbx, 5, kYmm},
    {CpuFeature::kFma, "fma", 1, 0, kEcx, 12, kYmm},
    {CpuFeature::kF16c, "f16c", 1, 0, kEcx, 29, kYmm},
    {CpuFeature::kAvx512f, "avx512f", 7, 0, kEbx, 16, kZmm},
    {CpuFeature::kAvx512bw, "avx512bw", 7, 0, kEbx, 30, kZmm},
    {CpuFeature::kAvx512dq, "avx512dq", 7, 0, kEbx, 17, kZmm},
    {CpuFeature::kAvx512vl, "avx512vl", 7, 0, kEbx, 31, kZmm},
    {CpuFeature::kAvx512vnni, "avx512_vnni", 7, 0, kEcx, 11, kZmm},
    {CpuFeature::kAvx512bf16, "avx512_bf16", 7, 1, kEax, 5, kZmm},
    {CpuFeature::kAvx512fp16, "avx512_fp16", 7, 0, kEdx, 23, kZmm},
    {CpuFeature::kAmxTile, "amx_tile", 7, 0, kEdx, 24, kTiles},
    {CpuFeature::kAmxInt8, "amx_int8", 7, 0, kEdx, 25, kTiles},
    {CpuFeature::kAmxBf16, "amx_bf16", 7, 0, kEdx, 22, kTiles},
};

constexpr auto kFeatures = [] {
  std::array<CpuFeature, std::size(kRows)> features{};
  for (size_t i = 0; i < features.size(); ++i) features[i] = kRows[i].feature;
  return features;
}();
constexpr bool rows_follow_the_enumeration() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (kRows[i].feature != static_cast<CpuFeature>(i)) return false;
  }
  return true;
}
static_assert(rows_follow_the_enumeration());

using Registers = std::array<uint32_t, 4>;

#if defined(__x86_64__)
// Zeros for a leaf that the processor does not have.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r{};
  __get_cpuid_count(leaf, subleaf, &r[kEax], &r[kEbx], &r[kEcx], &r[kEdx]);
  return r;
}

uint64_t saved_state() {
  constexpr uint32_t has_xgetbv = 1u << 27;
  if ((cpuid(1, 0)[kEcx] & has_xgetbv) == 0) return kXmm;
  uint32_t low = 0;
  uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}
#else
Registers cpuid(uint32_t, uint32_t) { return {}; }
uint64_t saved_state() { return 0; }
#endif

bool detect(const Row& row) {
  return ((cpuid(row.leaf, row.subleaf)[row.reg] >> row.bit) & 1) != 0 && (saved_state() & row.state) == row.state;
}

}  // namespace

std::span<const CpuFeature> all_cpu_features() { return kFeatures; }

std::string_view name_of(CpuFeature feature) { return kRows[static_cast<size_t>(feature)].name; }

bool cpu_has(CpuFeature feature) {
  static const auto found = [] {
    std::array<bool, std::size(kRows)> values{};
    for (size_t i = 0; i < values.size(); ++i) values[i] = detect(kRows[i]);
    return values;
  }();
  return found[static_cast<size_t>(feature)];
}

std::string cpu_brand() {
  // Three leaves of 16 characters each, padded with zeros or blanks.
  char text[49] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002 + i, 0);
    std::memcpy(text + 16 * i, r.data(), 16);
  }
  std::string brand(text);
  brand.erase(0, brand.find_first_not_of(' '));
  brand.erase(brand.find_last_not_of(' ') + 1);
  return brand.empty() ? "unknown" : brand;
}

}  // namespace chorale
