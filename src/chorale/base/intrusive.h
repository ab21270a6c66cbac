// Reference-counted objects with the count inside: a handle is one pointer wide and copying it is one atomic addition.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace chorale::base {

// T derives from RefCounted and provides `static void destroy(T*)`, called when the last reference goes.
class RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;

  void add_reference() const { references_.fetch_add(1, std::memory_order_relaxed); }
  // True when this was the last one.
  bool drop_reference() const {
    // A sole owner needs no read-modify-write: nobody else can add a reference meanwhile.
    if (references_.load(std::memory_order_acquire) == 1) return true;
    return references_.fetch_sub(1, std::memory_order_acq_rel) == 1;
  }
  // Nobody else has a reference, and what others did with theirs has happened.
  bool is_sole() const { return references_.load(std::memory_order_acquire) == 1; }
  int64_t use_count() const { return references_.load(std::memory_order_relaxed); }

 private:
  mutable std::atomic<int32_t> references_{1};
};

template <class T>
class Intrusive {
 public:
  Intrusive() = default;
  // Takes over the reference that a new object is born with.
  static Intrusive adopt(T* object) {
    Intrusive handle;
    handle.object_ = object;
    return handle;
  }
  // Adds a reference to an object that others own too.
  static Intrusive share(T* object) {
    if (object) object->add_reference();
    return adopt(object);
  }
  Intrusive(const Intrusive& other) : object_(other.object_) {
    if (object_) object_->add_reference();
  }
  Intrusive(Intrusive&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Intrusive& operator=(const Intrusive& other) {
    Intrusive copy(other);
    std::swap(object_, copy.object_);
    return *this;
  }
  Intrusive& operator=(Intrusive&& other) noexcept {
    Intrusive taken(std::move(other));
    std::swap(object_, taken.object_);
    return *this;
  }
  ~Intrusive() {
    if (object_ && object_->drop_reference()) T::destroy(object_);
  }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  T* release() { return std::exchange(object_, nullptr); }
  friend bool operator==(const Intrusive& a, const Intrusive& b) { return a.object_ == b.object_; }

 private:
  T* object_ = nullptr;
};

}  // namespace chorale::base
