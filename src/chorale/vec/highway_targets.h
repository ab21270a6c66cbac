// Which instruction sets are compiled: include before any header of Highway. SSE4 is the least we run on (every x86-64
// CPU since 2008); leaving out SSSE3 and the scalar fallback saves a third of the compile time.
#pragma once

#define HWY_BASELINE_TARGETS HWY_SSE4
#ifdef __clang__
// Clang chooses how a vector is passed by the flags of the whole file, not by the function's target: a call to SLEEF
// with wider vectors than SSE's goes wrong. It builds sanitizers and lint only, which are faster to build without them.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SCALAR | HWY_EMU128 | HWY_AVX2 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SCALAR | HWY_EMU128)
#endif
