// The bytes behind tensors. Several tensors may look at one storage; a version counts the writes to it.
#pragma once

#include <atomic>
#include <functional>

#include "chorale/base/intrusive.h"
#include "chorale/device/allocator.h"

namespace chorale::base {
template <class>
class Pool;
}

namespace chorale {

enum class Access : uint8_t { kReadWrite, kReadOnly };

class Storage : public base::RefCounted {
 public:
  // Memory from the device's allocator; on the null device there are no bytes behind `bytes`.
  static base::Intrusive<Storage> allocate(size_t bytes, Device device);
  // Somebody else's memory, which lives until `release` runs (once, when the last tensor on it goes, on whatever thread
  // that is; it must not throw), or longer than every tensor on it when there is no `release`.
  static base::Intrusive<Storage> wrap(void* data, size_t bytes, Device device, std::function<void()> release = {},
                                       Access access = Access::kReadWrite);
  // Only a place to count writes to, which may get bytes later.
  static base::Intrusive<Storage> without_bytes(Device device, size_t bytes = 0);
  static void destroy(Storage* storage);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  // Takes over the memory of another storage, which has none from then on; tensors on this one look at it when they
  // next set their pointers.
  void take_bytes_of(Storage& other);
  // Which trace was being recorded by the thread that made it; 0: none.
  uint32_t made_in_trace() const { return made_in_trace_; }
  static uint32_t current_trace();
  static void set_current_trace(uint32_t trace);

  bool read_only() const { return access_ == Access::kReadOnly; }
  // Asked before every write; throws InvalidArgument, naming the writer, when the memory is read-only.
  void check_writable(const char* writer) const {
    if (read_only()) [[unlikely]]
      raise_read_only(writer);
  }

  // Writes so far, and the last writer: a gradient that needs an overwritten value is reported with both.
  uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  const char* last_writer() const { return last_writer_.load(std::memory_order_relaxed); }
  void note_write(const char* writer) {
    version_.fetch_add(1, std::memory_order_relaxed);
    last_writer_.store(writer, std::memory_order_relaxed);
  }

 private:
  template <class>
  friend class base::Pool;
  Storage() = default;
  ~Storage() = default;
  [[noreturn]] static void raise_read_only(const char* writer);

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  memory::Block block_;
  std::function<void()>* release_ = nullptr;
  std::atomic<uint32_t> version_{0};
  std::atomic<const char*> last_writer_{nullptr};
  uint32_t made_in_trace_ = 0;
  Device device_;
  Access access_ = Access::kReadWrite;
};

}  // namespace chorale
