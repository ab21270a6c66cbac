// A small shared dictionary through which ranks find each other before they can talk: which are there, at which
// address, which number comes next. Not a data path: values are bounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/deadline.h"

namespace chorale::transport {

inline constexpr size_t kMaxStoreKeyBytes = 4096;
inline constexpr size_t kMaxStoreValueBytes = size_t{16} << 20;

// The store is not there any more: its server has gone, or its file was removed. There may be a new one at its place.
class StoreLost : public CommError {
 public:
  using CommError::CommError;
};

// Thread-safe. Keys are text, values are bytes held in a string. A call that cannot finish before its deadline throws
// CommError naming the keys it waited for; a lost server is a StoreLost that names its address. Keys or values beyond
// the bounds are InvalidArgument, and nothing is stored.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value, Deadline deadline) = 0;
  // Waits until the key exists.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  // Waits until all of them exist.
  virtual void wait(std::span<const std::string> keys, Deadline deadline) = 0;
  virtual bool contains(std::string_view key, Deadline deadline) = 0;
  // Adds to a decimal number (0 when the key does not exist) and returns the sum.
  virtual int64_t add(std::string_view key, int64_t delta, Deadline deadline) = 0;
  // Stores `desired` if the value is `expected`, or if the key does not exist and `expected` is empty. Returns the
  // value after the call; for a key that does not exist and an `expected` that is not empty, returns `expected`, and
  // creates nothing.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  Deadline deadline) = 0;
  // True if the key was there.
  virtual bool remove(std::string_view key, Deadline deadline) = 0;
  // Sorted.
  virtual std::vector<std::string> keys(std::string_view prefix, Deadline deadline) = 0;
  virtual int64_t count(Deadline deadline) = 0;
};

}  // namespace chorale::transport
