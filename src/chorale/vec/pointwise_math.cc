#include "chorale/vec/highway_targets.h"

#define CHORALE_SCALAR_SECTION_MATH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/pointwise_math.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/pointwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
void add_math(Kernels& kernels) { add_vector_loops(kernels); }
}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_math);
void add_math(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_math)(kernels); }
}  // namespace chorale::vec
#endif
