#include "chorale/op/builder.h"

#include "chorale/base/error.h"

namespace chorale::op {

namespace detail {
constinit thread_local Builder* current = nullptr;
}

Tensors not_differentiable(const GradArgs&) { throw InternalError("the gradient of an op without one was asked for"); }
void not_yet(const kernel::KernelArgs&) { throw StateError("this op has no kernel for this device yet"); }

}  // namespace chorale::op
