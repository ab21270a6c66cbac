#include "chorale/vec/highway_targets.h"

#define CHORALE_SCALAR_SECTION_ARITHMETIC
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/pointwise_arithmetic.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/pointwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
void add_arithmetic(Kernels& kernels) { add_vector_loops(kernels); }
}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_arithmetic);
void add_arithmetic(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_arithmetic)(kernels); }
}  // namespace chorale::vec
#endif
