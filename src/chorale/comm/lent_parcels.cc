#include "chorale/comm/lent_parcels.h"

#include <condition_variable>
#include <map>
#include <mutex>

#include "chorale/device/pages.h"
#include "chorale/device/shared_pages.h"

namespace chorale::comm {
namespace {

// Which storages are lent, and how often. A storage that has got fresh pages is not lent any more, though receivers
// still read its old ones: they share a number that is not in the table.
struct LentStorages {
  std::mutex mutex;
  std::condition_variable given_back;
  std::map<const Storage*, std::shared_ptr<int>> readers;
};
LentStorages& lent_storages() {
  static auto* const all = new LentStorages;  // it may be needed when the process ends
  return *all;
}

}  // namespace

Lent::Lent(base::Intrusive<Storage> storage) : storage_(std::move(storage)) {
  LentStorages& all = lent_storages();
  const std::lock_guard lock(all.mutex);
  std::shared_ptr<int>& readers = all.readers[storage_.get()];
  if (!readers) readers = std::make_shared<int>(0);
  ++*readers;
  readers_ = readers;
}

Lent& Lent::operator=(Lent&& other) noexcept {
  if (this == &other) return *this;
  end();
  storage_ = std::move(other.storage_);
  readers_ = std::move(other.readers_);
  return *this;
}

void Lent::end() {
  if (!readers_ || !storage_) return;
  LentStorages& all = lent_storages();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.readers.find(storage_.get());
    if (--*readers_ == 0 && found != all.readers.end() && found->second == readers_) all.readers.erase(found);
  }
  all.given_back.notify_all();
  readers_.reset();
}

void take_back(const Storage& storage) {
  auto* pages = dynamic_cast<SharedPages*>(&cpu_allocator().source());
  // Memory without pages of its own is never lent.
  if (pages && storage.bytes() > 0 && owns_pages(storage.data(), storage.bytes()))
    pages->renew(storage.data(), storage.bytes());
  LentStorages& all = lent_storages();
  const std::lock_guard lock(all.mutex);
  all.readers.erase(&storage);
}

bool reclaim(const Storage& storage, Deadline deadline) {
  LentStorages& all = lent_storages();
  {
    std::unique_lock lock(all.mutex);
    const auto is_free = [&] { return !all.readers.contains(&storage); };
    if (all.given_back.wait_until(lock, deadline.end(), is_free)) return true;
  }
  take_back(storage);
  return false;
}

}  // namespace chorale::comm
