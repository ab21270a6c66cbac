// Told of what happens to leaves' own gradients on this thread: a trace must know which of them a step reads, and which
// it replaces.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::autograd {

class GradientWatch {
 public:
  // The gradient of `leaf` is about to be looked at (or added to), or to be replaced.
  virtual void note_read(const Tensor& leaf) = 0;
  virtual void note_replaced(const Tensor& leaf) = 0;

 protected:
  ~GradientWatch() = default;
};

extern constinit thread_local GradientWatch* gradient_watch;  // or null

inline void watch_read(const Tensor& leaf) {
  if (gradient_watch) [[unlikely]]
    gradient_watch->note_read(leaf);
}
inline void watch_replaced(const Tensor& leaf) {
  if (gradient_watch) [[unlikely]]
    gradient_watch->note_replaced(leaf);
}

}  // namespace chorale::autograd
