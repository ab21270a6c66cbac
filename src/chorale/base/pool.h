// Small objects that come and go with every op call (tensor handles, tape nodes): a bounded free list per thread and type,
// so that in steady state making one is a pop. An object may die on another thread than the one that made it.
#pragma once

#include <new>
#include <utility>

namespace chorale {

template <class T>
class Pool {
 public:
  template <class... Args>
  static T* make(Args&&... args) {
    List& list = local();
    void* memory = list.head;
    if (memory) {
      list.head = list.head->next;
      --list.count;
    } else {
      memory = ::operator new(sizeof(T), std::align_val_t(alignof(T)));
    }
    return new (memory) T(std::forward<Args>(args)...);
  }
  static void recycle(T* object) {
    object->~T();
    List& list = local();
    // A thread that only consumes must not hoard what another one makes.
    if (list.count >= kMost || list.closed) {
      ::operator delete(object, std::align_val_t(alignof(T)));
      return;
    }
    list.head = new (object) Link{list.head};
    ++list.count;
  }

 private:
  static constexpr int kMost = 1024;
  struct Link {
    Link* next;
  };
  static_assert(sizeof(T) >= sizeof(Link));
  struct List {
    Link* head = nullptr;
    int count = 0;
    bool closed = false;  // the thread is ending: objects destroyed later go straight back
    ~List() {
      closed = true;
      while (head) ::operator delete(std::exchange(head, head->next), std::align_val_t(alignof(T)));
    }
  };
  static List& local() {
    thread_local List list;
    return list;
  }
};

}  // namespace chorale
