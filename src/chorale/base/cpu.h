// What the processor can do.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace chorale {

enum class CpuFeature : uint8_t {
  kSse42,
  kAvx,
  kAvx2,
  kFma,
  kF16c,
  kAvx512f,
  kAvx512bw,
  kAvx512dq,
  kAvx512vl,
  kAvx512vnni,
  kAvx512bf16,
  kAvx512fp16,
  kAmxTile,
  kAmxInt8,
  kAmxBf16,
};
std::span<const CpuFeature> all_cpu_features();

// The name that Linux has for it in /proc/cpuinfo: "avx512_bf16".
std::string_view name_of(CpuFeature feature);

// Asks CPUID, and is true only if the operating system saves the registers that the feature uses. A virtual machine may
// still advertise AMX that traps: kernel/cpu probes for that.
bool cpu_has(CpuFeature feature);

// "AMD EPYC 9654 96-Core Processor", as the processor calls itself.
std::string cpu_brand();

}  // namespace chorale
