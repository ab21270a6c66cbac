#include "chorale/kernel/cpu/support/cpu_probe.h"

#include <gtest/gtest.h>

#include "chorale/base/config.h"
#include "chorale/kernel/cpu/blas/openblas.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"

namespace chorale::kernel::cpu {
namespace {

TEST(CpuProbe, AnswersAndStaysConsistent) {
  const CpuProbe& cpu = cpu_probe();
  EXPECT_FALSE(cpu.model.empty());
  EXPECT_FALSE(cpu.amx_note.empty());
  EXPECT_TRUE(cpu.amx_advertised || !cpu.amx_usable);
  EXPECT_TRUE(cpu.avx2 || !cpu.avx512);
  EXPECT_EQ(&cpu, &cpu_probe());
}

TEST(OneDnn, StaysBelowAmxUnlessATrialWorked) {
  EXPECT_EQ(dnnl::version().substr(0, 2), "2.");
  EXPECT_TRUE(cpu_probe().amx_usable || dnnl::effective_isa().find("amx") == std::string::npos)
      << dnnl::effective_isa();
}

TEST(OpenBlas, RunsTheKernelsThatTheCpuDeserves) {
  if (!blas::openblas_trouble().empty()) GTEST_SKIP() << blas::openblas_trouble();
  const std::string& core = blas::openblas().core;
  const CpuProbe& cpu = cpu_probe();
  if (const auto chosen = config::env("OPENBLAS_CORETYPE"); chosen == (cpu.avx512 ? "SkylakeX" : "Haswell")) {
    EXPECT_EQ(core, *chosen);
  }
  EXPECT_FALSE(core.empty());
}

}  // namespace
}  // namespace chorale::kernel::cpu
