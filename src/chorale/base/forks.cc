#include "chorale/base/forks.h"

#include <pthread.h>
#include <unistd.h>

namespace chorale::base {

std::atomic<uint32_t> detail::forks{0};

ForkMark::ForkMark() : pid_(getpid()) {
  // A child inherits the handler with the memory: once is enough.
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { detail::forks.fetch_add(1, std::memory_order_relaxed); });
  forks_ = detail::forks.load(std::memory_order_relaxed);
}

}  // namespace chorale::base
