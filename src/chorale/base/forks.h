// Whether this process is a forked child of the one that made something. Threads, connections and shared memory of the
// parent are not the child's to use: what owns such things remembers a ForkMark and looks at it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace chorale::base {
namespace detail {
extern std::atomic<uint32_t> forks;  // counted in each child
}  // namespace detail

// Taken in the process that makes something.
class ForkMark {
 public:
  ForkMark();
  // True in a child, and in its children. One load: fit for every call.
  bool is_foreign() const { return detail::forks.load(std::memory_order_relaxed) != forks_; }
  // The number of the process that made it.
  int64_t pid() const { return pid_; }

 private:
  uint32_t forks_;
  int64_t pid_;
};

// The same object, which a forked child does not destroy: it leaves it as it is, for the threads and connections in it
// are its parent's.
template <class T>
std::shared_ptr<T> kept_by_children(std::shared_ptr<T> made) {
  T* const object = made.get();
  auto* const holder = new std::shared_ptr<T>(std::move(made));
  return {object, [holder, mark = ForkMark()](T*) {
            if (!mark.is_foreign()) delete holder;
          }};
}

}  // namespace chorale::base
