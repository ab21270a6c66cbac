// What a thread records.
#pragma once

#include <functional>
#include <memory>

#include "chorale/tensor/tensor.h"

namespace chorale {

namespace autograd {
struct SavedTensorHooks;
struct Mode {
  bool grad = true;
  bool inference = false;
  bool anomaly = false;
  const SavedTensorHooks* saved_hooks = nullptr;  // innermost
};
extern constinit thread_local Mode mode;

// Restores the thread's mode at the end of the scope.
class ModeScope {
 public:
  ModeScope() : before_(mode) {}
  ~ModeScope() { mode = before_; }
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  Mode before_;
};

struct SavedTensorHooks {
  std::function<std::shared_ptr<void>(const Tensor&)> pack;
  std::function<Tensor(const std::shared_ptr<void>&)> unpack;
};
}  // namespace autograd

// Scopes: `NoGrad scope;` records nothing until the end of the block; EnableGrad records inside it again. Inference is
// NoGrad for tensors that will never meet autograd: using one later in a recorded op that must save it is an error.
class NoGrad : autograd::ModeScope {
 public:
  NoGrad() { autograd::mode.grad = false; }
};
class EnableGrad : autograd::ModeScope {
 public:
  EnableGrad() {
    autograd::mode.grad = true;
    autograd::mode.inference = false;
  }
};
class Inference : autograd::ModeScope {
 public:
  Inference() {
    autograd::mode.grad = false;
    autograd::mode.inference = true;
  }
};
// Finds the op whose gradient first became NaN: backward checks every gradient and throws a StateError that names it.
class DetectAnomaly : autograd::ModeScope {
 public:
  DetectAnomaly() { autograd::mode.anomaly = true; }
};
// Values saved for backward inside the scope are packed by one function and unpacked by the other (offloading,
// recomputing, compressing). Scopes nest; the innermost counts.
class SavedTensorHooksScope : autograd::ModeScope {
 public:
  explicit SavedTensorHooksScope(autograd::SavedTensorHooks hooks) : hooks_(std::move(hooks)) {
    autograd::mode.saved_hooks = &hooks_;
  }

 private:
  autograd::SavedTensorHooks hooks_;
};

inline bool grad_enabled() { return autograd::mode.grad; }

}  // namespace chorale
