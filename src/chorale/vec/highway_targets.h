// Which instruction sets are compiled: include before any header of Highway. SSE4 is the least we run on (every x86-64
// CPU since 2008); leaving out SSSE3 and the scalar fallback saves a third of the compile time.
#pragma once

#define HWY_BASELINE_TARGETS HWY_SSE4
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SCALAR | HWY_EMU128)
