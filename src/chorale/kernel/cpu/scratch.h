// Working memory of kernels: reused from call to call, so that a kernel in a training loop does not allocate.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chorale::kernel::cpu {

// A block of at least `bytes`, aligned to 64 bytes, contents undefined, from a pool of the calling thread; must be
// destroyed by the same thread. Blocks up to kKeptBytes go back to the pool, larger ones to the system.
class Scratch {
 public:
  static constexpr size_t kKeptBytes = size_t{64} << 20;

  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace chorale::kernel::cpu
