// A vector that keeps up to N elements inside itself: shapes and operand lists are on the path of every op call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace chorale {

template <class T, size_t N>
class SmallVector {
  // Growing and taking over another's elements cannot fail half way.
  static_assert(N > 0 && std::is_nothrow_move_constructible_v<T>);

 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  SmallVector() = default;
  // These delegate so that the destructor cleans up when copying an element throws.
  explicit SmallVector(size_t count) : SmallVector() { resize(count); }
  SmallVector(size_t count, const T& value) : SmallVector() { resize(count, value); }
  SmallVector(std::initializer_list<T> list) : SmallVector(list.begin(), list.end()) {}
  explicit SmallVector(std::span<const T> list) : SmallVector(list.begin(), list.end()) {}
  template <std::forward_iterator It>
  SmallVector(It first, It last) : SmallVector() {
    append(first, last);
  }
  SmallVector(const SmallVector& other) : SmallVector() { copy(other); }
  SmallVector(SmallVector&& other) noexcept { take(other); }
  SmallVector& operator=(const SmallVector& other) {
    if (this != &other) {
      clear();
      copy(other);
    }
    return *this;
  }
  SmallVector& operator=(SmallVector&& other) noexcept {
    if (this != &other) {
      clear();
      free_heap();
      take(other);
    }
    return *this;
  }
  ~SmallVector() {
    clear();
    free_heap();
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T& front() { return data_[0]; }
  const T& front() const { return data_[0]; }
  T& back() { return data_[size_ - 1]; }
  const T& back() const { return data_[size_ - 1]; }

  void clear() {
    std::destroy(begin(), end());
    size_ = 0;
  }
  void reserve(size_t capacity) {
    if (capacity > capacity_) grow(capacity);
  }
  void push_back(T value) {
    if (size_ == capacity_) grow(capacity_ * 2);
    std::construct_at(data_ + size_, std::move(value));
    ++size_;
  }
  template <class... Args>
  T& emplace_back(Args&&... args) {
    push_back(T(std::forward<Args>(args)...));
    return back();
  }
  void pop_back() { std::destroy_at(data_ + --size_); }
  // `value` is taken by value, since it may be an element of this vector, which growing moves.
  void resize(size_t count) {
    reserve(count);
    for (; size_ < count; ++size_) std::construct_at(data_ + size_);
    while (size_ > count) pop_back();
  }
  void resize(size_t count, T value) {
    reserve(count);
    for (; size_ < count; ++size_) std::construct_at(data_ + size_, value);
    while (size_ > count) pop_back();
  }
  // The range must not be part of this vector.
  template <class It>
  void append(It first, It last) {
    reserve(size_ + static_cast<size_t>(std::distance(first, last)));
    for (; first != last; ++first, ++size_) std::construct_at(data_ + size_, *first);
  }
  void insert(size_t at, T value) {
    push_back(std::move(value));
    std::rotate(begin() + at, end() - 1, end());
  }
  void erase(size_t at) {
    std::move(begin() + at + 1, end(), begin() + at);
    pop_back();
  }

  friend bool operator==(const SmallVector& a, const SmallVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  T* inline_data() { return reinterpret_cast<T*>(storage_); }
  bool is_inline() const { return data_ == reinterpret_cast<const T*>(storage_); }
  void free_heap() {
    if (!is_inline()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = inline_data();
    capacity_ = N;
  }
  void grow(size_t capacity) {
    T* fresh = std::allocator<T>().allocate(capacity);
    std::uninitialized_move(begin(), end(), fresh);
    std::destroy(begin(), end());
    if (!is_inline()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = fresh;
    capacity_ = static_cast<uint32_t>(capacity);
  }
  // Shapes have few dimensions and were often written just now, number by number: single moves beat a call of memmove,
  // and a wider load would have to wait for those stores. The empty statement keeps the compiler from making either of
  // the loop.
  static constexpr bool kSingly = std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(void*);
  // Precondition: this is empty and has room.
  void copy_singly(const SmallVector& other) {
    for (uint32_t i = 0; i < other.size_; ++i) {
      data_[i] = other.data_[i];
      asm("" : "+r"(i));
    }
    size_ = other.size_;
  }
  // Precondition: this is empty.
  void copy(const SmallVector& other) {
    if constexpr (kSingly) {
      reserve(other.size_);
      copy_singly(other);
    } else {
      append(other.begin(), other.end());
    }
  }
  // Precondition: this is empty and inline.
  void take(SmallVector& other) noexcept {
    if (!other.is_inline()) {
      data_ = std::exchange(other.data_, other.inline_data());
      capacity_ = std::exchange(other.capacity_, static_cast<uint32_t>(N));
      size_ = std::exchange(other.size_, 0);
    } else if constexpr (kSingly) {
      copy_singly(other);
      other.size_ = 0;
    } else {
      std::uninitialized_move(other.begin(), other.end(), data_);
      size_ = other.size_;
      other.clear();
    }
  }

  T* data_ = inline_data();
  uint32_t size_ = 0;
  uint32_t capacity_ = N;
  alignas(T) std::byte storage_[N * sizeof(T)];
};

}  // namespace chorale
