#include "chorale/transport/store/store_table.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::transport {

void check_store_key(std::string_view key) {
  CHORALE_CHECK(!key.empty(), "[store] a key must not be empty");
  CHORALE_CHECK(key.size() <= kMaxStoreKeyBytes, "[store] key of ", key.size(), " bytes ('", key.substr(0, 40),
                "…'); at most ", kMaxStoreKeyBytes, " are allowed");
}

void check_store_value(std::string_view key, std::string_view value) {
  CHORALE_CHECK(value.size() <= kMaxStoreValueBytes, "[store] value of ", value.size(), " bytes for '", key,
                "'; at most ", kMaxStoreValueBytes,
                " are allowed: the store is for addresses and numbers, send data "
                "through a group");
}

void StoreTable::set(std::string_view key, std::string_view value) {
  check_store_key(key);
  check_store_value(key, value);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) {
    entries_.emplace(key, value);
  } else {
    entry->second = value;
  }
}

const std::string* StoreTable::find(std::string_view key) const {
  const auto entry = entries_.find(key);
  return entry == entries_.end() ? nullptr : &entry->second;
}

std::vector<std::string> StoreTable::missing(std::span<const std::string> keys) const {
  std::vector<std::string> names;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(names),
               [&](const std::string& key) { return !entries_.contains(key); });
  return names;
}

int64_t StoreTable::add(std::string_view key, int64_t delta) {
  int64_t sum = 0;
  if (const std::string* value = find(key)) {
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), sum);
    CHORALE_CHECK(error == std::errc() && end == value->data() + value->size(), "[store] add: the value of '", key,
                  "' is not a decimal number of 64 bits: '", value->substr(0, 40), "'");
  }
  CHORALE_CHECK(!__builtin_add_overflow(sum, delta, &sum), "[store] add: '", key, "' would exceed 64 bits");
  set(key, std::to_string(sum));
  return sum;
}

std::string StoreTable::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  check_store_key(key);
  const std::string* value = find(key);
  if (value ? *value != expected : !expected.empty()) return value ? *value : std::string(expected);
  set(key, desired);
  return std::string(desired);
}

bool StoreTable::remove(std::string_view key) {
  check_store_key(key);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return false;
  entries_.erase(entry);
  return true;
}

std::vector<std::string> StoreTable::keys(std::string_view prefix) const {
  std::vector<std::string> found;
  for (auto entry = entries_.lower_bound(prefix); entry != entries_.end() && entry->first.starts_with(prefix);
       ++entry) {
    found.push_back(entry->first);
  }
  return found;
}

void throw_store_timeout(std::string_view call, std::string_view where, std::span<const std::string> missing) {
  constexpr size_t kNamed = 8;
  std::string names;
  for (const std::string& key : missing.first(std::min(kNamed, missing.size()))) {
    names += (names.empty() ? "'" : ", '") + key + "'";
  }
  if (missing.size() > kNamed) names += concat(" and ", missing.size() - kNamed, " more");
  throw CommError(missing.empty() ? concat("[store] ", call, ": no answer from ", where, " before the deadline")
                                  : concat("[store] ", call, ": nobody set ", names, " in ", where,
                                           " before the deadline; did a rank fail to start?"));
}

}  // namespace chorale::transport
