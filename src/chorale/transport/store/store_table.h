// The entries of a store and what each call does to them, the same for every store. Knows no locks and no waiting.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/transport/store/store.h"

namespace chorale::transport {

// Throws InvalidArgument when the key is empty or too long, or the value too large.
void check_store_key(std::string_view key);
void check_store_value(std::string_view key, std::string_view value);

class StoreTable {
 public:
  void set(std::string_view key, std::string_view value);
  // Null when the key does not exist; valid until the next change.
  const std::string* find(std::string_view key) const;
  // Which of the keys do not exist.
  std::vector<std::string> missing(std::span<const std::string> keys) const;
  int64_t add(std::string_view key, int64_t delta);
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  bool remove(std::string_view key);
  std::vector<std::string> keys(std::string_view prefix) const;
  int64_t count() const { return static_cast<int64_t>(entries_.size()); }

 private:
  std::map<std::string, std::string, std::less<>> entries_;
};

// The CommError of a call whose deadline passed: "[store] get: nobody set 'a' …". `where` names the store.
[[noreturn]] void throw_store_timeout(std::string_view call, std::string_view where,
                                      std::span<const std::string> missing);

}  // namespace chorale::transport
