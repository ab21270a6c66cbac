#include "chorale/vec/highway_targets.h"

#define CHORALE_SCALAR_SECTION_ARITHMETIC
#define CHORALE_SCALAR_SECTION_MATH
#define CHORALE_SCALAR_SECTION_ACTIVATION
#define CHORALE_SCALAR_SECTION_COMPARE
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/pointwise_integer.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/pointwise_scalar-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
void add_integer(Kernels& kernels) {
  add_scalar_loops<bool>(kernels);
  add_scalar_loops<uint8_t>(kernels);
  add_scalar_loops<int8_t>(kernels);
  add_scalar_loops<int16_t>(kernels);
  add_scalar_loops<int32_t>(kernels);
  add_scalar_loops<int64_t>(kernels);
}
}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_integer);
void add_integer(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_integer)(kernels); }
}  // namespace chorale::vec
#endif
