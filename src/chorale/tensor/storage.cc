#include "chorale/tensor/storage.h"

#include "chorale/base/error.h"
#include "chorale/base/pool.h"

namespace chorale {

namespace {
constinit thread_local uint32_t trace_of_thread = 0;
}

uint32_t Storage::current_trace() { return trace_of_thread; }
void Storage::set_current_trace(uint32_t trace) { trace_of_thread = trace; }

base::Intrusive<Storage> Storage::allocate(size_t bytes, Device device) {
  auto storage = base::Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  storage->bytes_ = bytes;
  storage->made_in_trace_ = trace_of_thread;
  if (device.type != DeviceType::kNull) {
    storage->block_ = allocator_of(device).allocate(bytes);
    storage->data_ = storage->block_.data;
  }
  return storage;
}

base::Intrusive<Storage> Storage::wrap(void* data, size_t bytes, Device device, std::function<void()> release,
                                       Access access) {
  CHORALE_CHECK(device.type != DeviceType::kNull, "[wrap] the null device has no memory that could be wrapped");
  CHORALE_CHECK(data || bytes == 0, "[wrap] a null pointer has no ", bytes, " bytes");
  auto storage = base::Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  storage->bytes_ = bytes;
  storage->data_ = static_cast<std::byte*>(data);
  storage->access_ = access;
  storage->made_in_trace_ = trace_of_thread;
  if (release) storage->release_ = new std::function<void()>(std::move(release));
  return storage;
}

base::Intrusive<Storage> Storage::without_bytes(Device device, size_t bytes) {
  auto storage = base::Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  storage->bytes_ = bytes;
  return storage;
}

void Storage::take_bytes_of(Storage& other) {
  CHORALE_INVARIANT(!data_ && !block_.data, "a storage that has bytes cannot take over others");
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  block_ = std::exchange(other.block_, memory::Block{});
  release_ = std::exchange(other.release_, nullptr);
}

void Storage::raise_read_only(const char* writer) {
  throw InvalidArgument(concat("[", writer, "] cannot write into a tensor on read-only memory; clone it first"));
}

void Storage::destroy(Storage* storage) {
  if (storage->block_.data) allocator_of(storage->device_).deallocate(storage->block_);
  if (storage->release_) {
    (*storage->release_)();
    delete storage->release_;
  }
  base::Pool<Storage>::recycle(storage);
}

}  // namespace chorale
