#include "chorale/vec/highway_targets.h"

#define CHORALE_SCALAR_SECTION_MATH
#define CHORALE_SCALAR_SECTION_ACTIVATION
#define CHORALE_SCALAR_SECTION_COMPARE
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/pointwise_functions.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/pointwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
void add_functions(Kernels& kernels) { add_vector_loops(kernels); }
}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_functions);
void add_functions(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_functions)(kernels); }
}  // namespace chorale::vec
#endif
