// A hash map from pointers to small numbers: open addressing, no allocation per entry, no erasing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace chorale::base {

class PointerMap {
 public:
  static constexpr uint32_t kAbsent = ~0u;

  uint32_t find(const void* key) const {
    if (slots_.empty()) return kAbsent;
    for (size_t at = hash(key);; ++at) {
      const Entry& entry = slots_[at & (slots_.size() - 1)];
      if (entry.key == key) return entry.value;
      if (!entry.key) return kAbsent;
    }
  }
  // The value of `key`; `value` when it was absent, which is then stored (the second result says so).
  std::pair<uint32_t, bool> insert(const void* key, uint32_t value) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    for (size_t at = hash(key);; ++at) {
      Entry& entry = slots_[at & (slots_.size() - 1)];
      if (entry.key == key) return {entry.value, false};
      if (entry.key) continue;
      entry = {key, value};
      ++count_;
      return {value, true};
    }
  }

 private:
  struct Entry {
    const void* key = nullptr;
    uint32_t value = 0;
  };
  static size_t hash(const void* key) {
    return static_cast<size_t>((reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15u >> 20);
  }
  void grow() {
    std::vector<Entry> old(slots_.empty() ? 64 : slots_.size() * 2);
    std::swap(old, slots_);
    count_ = 0;
    for (const Entry& entry : old) {
      if (entry.key) insert(entry.key, entry.value);
    }
  }

  std::vector<Entry> slots_;  // a power of two, at most half full
  size_t count_ = 0;
};

}  // namespace chorale::base
