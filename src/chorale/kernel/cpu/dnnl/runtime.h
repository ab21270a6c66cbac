// oneDNN's process-wide state. Everything that touches its interface lives in this folder: another major version is
// another set of files.
#pragma once

#include <string>

namespace chorale::kernel::cpu::dnnl {

// Must have run before any other call of oneDNN; cheap to call again. Limits oneDNN to instructions that work here
// (Note [AMX trial] in cpu_probe.cc), unless the user has set ONEDNN_MAX_CPU_ISA or DNNL_MAX_CPU_ISA.
void initialize();

std::string version();        // "2.6.3"
std::string effective_isa();  // "avx512_core_bf16"

}  // namespace chorale::kernel::cpu::dnnl
