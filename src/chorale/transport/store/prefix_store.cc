#include "chorale/transport/store/prefix_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/transport/store/store_table.h"

namespace chorale::transport {

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {
  CHORALE_CHECK(store_, "[store] a prefix view needs a store");
}

std::string PrefixStore::full(std::string_view key) const {
  check_store_key(key);
  return prefix_ + std::string(key);
}

void PrefixStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  store_->set(full(key), value, deadline);
}

std::string PrefixStore::get(std::string_view key, Deadline deadline) { return store_->get(full(key), deadline); }

void PrefixStore::wait(std::span<const std::string> keys, Deadline deadline) {
  std::vector<std::string> all;
  std::transform(keys.begin(), keys.end(), std::back_inserter(all), [&](const std::string& key) { return full(key); });
  store_->wait(all, deadline);
}

bool PrefixStore::contains(std::string_view key, Deadline deadline) { return store_->contains(full(key), deadline); }

int64_t PrefixStore::add(std::string_view key, int64_t delta, Deadline deadline) {
  return store_->add(full(key), delta, deadline);
}

std::string PrefixStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                     Deadline deadline) {
  return store_->compare_set(full(key), expected, desired, deadline);
}

bool PrefixStore::remove(std::string_view key, Deadline deadline) { return store_->remove(full(key), deadline); }

std::vector<std::string> PrefixStore::keys(std::string_view prefix, Deadline deadline) {
  std::vector<std::string> found = store_->keys(prefix_ + std::string(prefix), deadline);
  for (std::string& key : found) key.erase(0, prefix_.size());
  return found;
}

int64_t PrefixStore::count(Deadline deadline) { return static_cast<int64_t>(store_->keys(prefix_, deadline).size()); }

}  // namespace chorale::transport
