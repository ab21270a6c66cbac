// Told of the sharded tensors that this thread meets: a trace knows their parts, and must learn whose they are.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::sharding {

class ShardedWatch {
 public:
  // A sharded operand, before its part is used.
  virtual void note_used(const Tensor& x) = 0;
  // A sharded tensor that was put around a part.
  virtual void note_made(const Tensor& x) = 0;
  // A tensor made from numbers that follow from the mesh and from placements alone.
  virtual void note_constant(const Tensor& x) = 0;

 protected:
  ~ShardedWatch() = default;
};

extern constinit thread_local ShardedWatch* sharded_watch;  // or null

inline void watch_used(const Tensor& x) {
  if (sharded_watch) [[unlikely]]
    sharded_watch->note_used(x);
}
inline Tensor watch_constant(Tensor x) {
  if (sharded_watch) [[unlikely]]
    sharded_watch->note_constant(x);
  return x;
}

}  // namespace chorale::sharding
