// Bytes that were put in at the end and are taken from the front, in one piece of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

namespace chorale::transport {

class ByteQueue {
 public:
  size_t size() const { return end_ - begin_; }
  bool empty() const { return begin_ == end_; }
  std::span<const std::byte> bytes() const { return {memory_.get() + begin_, size()}; }

  // Room for so many bytes at the end, and perhaps more; commit() says how many were put there.
  std::span<std::byte> room(size_t bytes) {
    if (empty()) begin_ = end_ = 0;
    if (capacity_ - end_ < bytes) make_room(bytes);
    return {memory_.get() + end_, capacity_ - end_};
  }
  void commit(size_t bytes) { end_ += bytes; }
  void push(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(room(bytes.size()).data(), bytes.data(), bytes.size());
    commit(bytes.size());
  }
  void pop(size_t bytes) { begin_ += bytes; }
  // Gives the memory back; the queue is empty.
  void release() { *this = ByteQueue(); }

 private:
  void make_room(size_t bytes) {
    const size_t held = size();
    if (capacity_ < 2 * (held + bytes)) {
      const size_t capacity = 2 * (held + bytes);
      std::unique_ptr<std::byte[]> larger(new std::byte[capacity]);
      if (held > 0) std::memcpy(larger.get(), memory_.get() + begin_, held);
      memory_ = std::move(larger);
      capacity_ = capacity;
    } else {
      // At least as much is free as is moved.
      std::memmove(memory_.get(), memory_.get() + begin_, held);
    }
    begin_ = 0;
    end_ = held;
  }

  std::unique_ptr<std::byte[]> memory_;
  size_t capacity_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace chorale::transport
