// What this CPU can really do, asked once per process.
#pragma once

#include <string>

namespace chorale::kernel::cpu {

struct CpuProbe {
  std::string model;    // "AMD EPYC"
  bool avx2 = false;    // with FMA
  bool avx512 = false;  // F, BW, DQ and VL: what x86-64-v4 asks for
  bool avx512_bf16 = false;
  bool amd = false;
  bool amx_advertised = false;  // by CPUID: tiles and their bf16 product
  bool amx_usable = false;      // and a trial worked
  std::string amx_note;         // a sentence for people
};

// Thread-safe. The first call may start a child process for a millisecond (only where AMX is advertised).
const CpuProbe& cpu_probe();

}  // namespace chorale::kernel::cpu
