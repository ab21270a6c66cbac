#include "chorale/kernel/cpu/dnnl/runtime.h"

#include <oneapi/dnnl/dnnl.h>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/kernel/cpu/support/cpu_probe.h"

namespace chorale::kernel::cpu::dnnl {

void initialize() {
  static const bool done = [] {
    const CpuProbe& cpu = cpu_probe();
    if (cpu.amx_advertised && !cpu.amx_usable && !config::env("ONEDNN_MAX_CPU_ISA") &&
        !config::env("DNNL_MAX_CPU_ISA")) {
      CHORALE_INVARIANT(dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16) == dnnl_success,
                        "oneDNN was used before its instruction set was limited");
    }
    return true;
  }();
  (void)done;
}

std::string version() {
  const dnnl_version_t* v = dnnl_version();
  return concat(v->major, ".", v->minor, ".", v->patch);
}

std::string effective_isa() {
  initialize();
  switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
      return "sse41";
    case dnnl_cpu_isa_avx:
      return "avx";
    case dnnl_cpu_isa_avx2:
      return "avx2";
    case dnnl_cpu_isa_avx2_vnni:
      return "avx2_vnni";
    case dnnl_cpu_isa_avx512_core:
      return "avx512_core";
    case dnnl_cpu_isa_avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl_cpu_isa_avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl_cpu_isa_avx512_core_amx:
      return "avx512_core_amx";
    default:
      return "generic";
  }
}

}  // namespace chorale::kernel::cpu::dnnl
