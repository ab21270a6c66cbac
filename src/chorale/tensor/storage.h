// The bytes behind tensors. Several tensors may look at one storage; a version counts the writes to it.
#pragma once

#include <atomic>
#include <functional>

#include "chorale/base/intrusive.h"
#include "chorale/device/allocator.h"

namespace chorale {

class Storage : public RefCounted {
 public:
  // Memory from the device's allocator; on the null device there are no bytes behind `bytes`.
  static Intrusive<Storage> allocate(size_t bytes, Device device);
  // Somebody else's memory; `release` runs when the last tensor on it goes. It must outlive that moment when `release` is empty.
  static Intrusive<Storage> wrap(void* data, size_t bytes, Device device, std::function<void()> release = {});
  static void destroy(Storage* storage);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  // Writes so far, and who wrote last: a gradient that needs an overwritten value is reported with both.
  uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  const char* last_writer() const { return last_writer_.load(std::memory_order_relaxed); }
  void note_write(const char* writer) {
    version_.fetch_add(1, std::memory_order_relaxed);
    last_writer_.store(writer, std::memory_order_relaxed);
  }

 private:
  template <class>
  friend class Pool;
  Storage() = default;
  ~Storage() = default;

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  Block block_;
  std::function<void()>* release_ = nullptr;
  std::atomic<uint32_t> version_{0};
  std::atomic<const char*> last_writer_{nullptr};
  Device device_;
};

}  // namespace chorale
