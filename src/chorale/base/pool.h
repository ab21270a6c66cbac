// Small objects that come and go with every op call (tensor handles, tape nodes): a bounded free list per thread and
// type, so that in steady state making one is a pop. An object may die on another thread than the one that made it.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <new>
#include <utility>

namespace chorale::base {

template <class T>
class Pool {
 public:
  template <class... Args>
  static T* make(Args&&... args) {
    List& list = list_;
    void* memory = list.head;
    if (memory) [[likely]] {
      list.head = list.head->next;
      --list.count;
      ASAN_UNPOISON_MEMORY_REGION(memory, sizeof(T));
    } else {
      memory = ::operator new(sizeof(T), std::align_val_t(alignof(T)));
    }
    return new (memory) T(std::forward<Args>(args)...);
  }
  static void recycle(T* object) {
    object->~T();
    List& list = list_;
    // A thread that only consumes must not hoard what another one makes.
    if (list.count >= kMost || list.phase != Phase::kOpen) [[unlikely]] {
      if (list.phase != Phase::kNew) {
        ::operator delete(object, std::align_val_t(alignof(T)));
        return;
      }
      thread_local const Closer closer;
      list.phase = Phase::kOpen;
    }
    list.head = new (object) Link{list.head};
    ++list.count;
    // A use of a dead object is an error even though its memory is still ours.
    ASAN_POISON_MEMORY_REGION(list.head + 1, sizeof(T) - sizeof(Link));
  }

 private:
  static constexpr int kMost = 1024;
  struct Link {
    Link* next;
  };
  static_assert(sizeof(T) >= sizeof(Link));
  // kClosed: the thread is ending, objects destroyed later go straight back.
  enum class Phase : uint8_t { kNew, kOpen, kClosed };
  // It has no destructor, because objects may die after those of the thread's variables (in static storage): a write to
  // an object that its destructor ends is one the compiler may leave out.
  struct List {
    Link* head = nullptr;
    int count = 0;
    Phase phase = Phase::kNew;
  };
  struct Closer {
    Closer() = default;
    ~Closer() {
      List& list = list_;
      list.phase = Phase::kClosed;
      list.count = 0;
      for (Link* link = std::exchange(list.head, nullptr); link;) {
        ASAN_UNPOISON_MEMORY_REGION(link, sizeof(T));
        ::operator delete(std::exchange(link, link->next), std::align_val_t(alignof(T)));
      }
    }
  };
  static inline constinit thread_local List list_{};
};

}  // namespace chorale::base
