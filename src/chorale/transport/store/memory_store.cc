#include "chorale/transport/store/memory_store.h"

namespace chorale::transport {
namespace {

constexpr std::string_view kWhere = "the store of this process";

}  // namespace

void MemoryStore::set(std::string_view key, std::string_view value, Deadline) {
  const std::lock_guard lock(mutex_);
  table_.set(key, value);
  changed_.notify_all();
}

std::string MemoryStore::get(std::string_view key, Deadline deadline) {
  check_store_key(key);
  std::unique_lock lock(mutex_);
  while (true) {
    if (const std::string* value = table_.find(key)) return *value;
    if (deadline.passed()) throw_store_timeout("get", kWhere, std::vector{std::string(key)});
    changed_.wait_until(lock, deadline.end());
  }
}

void MemoryStore::wait(std::span<const std::string> keys, Deadline deadline) {
  for (const std::string& key : keys) check_store_key(key);
  std::unique_lock lock(mutex_);
  while (true) {
    const std::vector<std::string> missing = table_.missing(keys);
    if (missing.empty()) return;
    if (deadline.passed()) throw_store_timeout("wait", kWhere, missing);
    changed_.wait_until(lock, deadline.end());
  }
}

bool MemoryStore::contains(std::string_view key, Deadline) {
  check_store_key(key);
  const std::lock_guard lock(mutex_);
  return table_.find(key) != nullptr;
}

int64_t MemoryStore::add(std::string_view key, int64_t delta, Deadline) {
  const std::lock_guard lock(mutex_);
  const int64_t sum = table_.add(key, delta);
  changed_.notify_all();
  return sum;
}

std::string MemoryStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                     Deadline) {
  const std::lock_guard lock(mutex_);
  std::string value = table_.compare_set(key, expected, desired);
  changed_.notify_all();
  return value;
}

bool MemoryStore::remove(std::string_view key, Deadline) {
  const std::lock_guard lock(mutex_);
  return table_.remove(key);
}

std::vector<std::string> MemoryStore::keys(std::string_view prefix, Deadline) {
  const std::lock_guard lock(mutex_);
  return table_.keys(prefix);
}

int64_t MemoryStore::count(Deadline) {
  const std::lock_guard lock(mutex_);
  return table_.count();
}

}  // namespace chorale::transport
