// Threads inside a rank: OpenMP, the pool that oneDNN and OpenBLAS use too.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorale {

namespace base {

// A borrowed callable: no allocation, must not outlive what it refers to.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
      FunctionRef(F&& f)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(&f))), call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace base

// Threads that parallel_for may use (OpenMP's maximum for the calling thread), and how to change it (at least 1).
int thread_count();
void set_thread_count(int count);

// Calls body(begin, end) for pieces that cover [0, count). Pieces have at least `grain` elements, so that small work
// stays on the calling thread; nested calls run inline. The cut depends on count, grain and thread_count() only. An
// exception from a piece is rethrown here (the first one).
void parallel_for(int64_t count, int64_t grain, base::FunctionRef<void(int64_t begin, int64_t end)> body);

}  // namespace chorale
