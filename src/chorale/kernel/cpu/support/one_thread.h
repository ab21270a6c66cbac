// Work that stays on the calling thread, also inside of libraries.
#pragma once

#include "chorale/base/parallel_for.h"

namespace chorale::kernel::cpu {

// As long as it lives, and if `only`, the calling thread and the libraries that it calls start no others.
class OneThread {
 public:
  explicit OneThread(bool only = true) : before_(only ? thread_count() : 1) {
    if (before_ > 1) set_thread_count(1);
  }
  ~OneThread() {
    if (before_ > 1) set_thread_count(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace chorale::kernel::cpu
