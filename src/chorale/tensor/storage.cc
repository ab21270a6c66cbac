#include "chorale/tensor/storage.h"

#include "chorale/base/error.h"
#include "chorale/base/pool.h"

namespace chorale {

Intrusive<Storage> Storage::allocate(size_t bytes, Device device) {
  auto storage = Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  storage->bytes_ = bytes;
  if (device.type != DeviceType::kNull) {
    storage->block_ = allocator_of(device).allocate(bytes);
    storage->data_ = storage->block_.data;
  }
  return storage;
}

Intrusive<Storage> Storage::wrap(void* data, size_t bytes, Device device, std::function<void()> release,
                                 Access access) {
  CHORALE_CHECK(device.type != DeviceType::kNull, "[wrap] the null device has no memory that could be wrapped");
  CHORALE_CHECK(data || bytes == 0, "[wrap] a null pointer has no ", bytes, " bytes");
  auto storage = Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  storage->bytes_ = bytes;
  storage->data_ = static_cast<std::byte*>(data);
  storage->access_ = access;
  if (release) storage->release_ = new std::function<void()>(std::move(release));
  return storage;
}

Intrusive<Storage> Storage::without_bytes(Device device) {
  auto storage = Intrusive<Storage>::adopt(base::Pool<Storage>::make());
  storage->device_ = device;
  return storage;
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
