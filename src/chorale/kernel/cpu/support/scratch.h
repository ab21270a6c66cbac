// Working memory of kernels, from the allocator of tensors: it is reused from call to call, and counted in the peak.
#pragma once

#include "chorale/device/allocator.h"

namespace chorale::kernel::cpu {

// Memory of at least `bytes`, aligned to 64, with undefined contents; none for 0.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : block_(bytes == 0 ? memory::Block{} : cpu_allocator().allocate(bytes)) {}
  ~Scratch() {
    if (block_.data != nullptr) cpu_allocator().deallocate(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(static_cast<void*>(block_.data));
  }

 private:
  memory::Block block_;
};

}  // namespace chorale::kernel::cpu
