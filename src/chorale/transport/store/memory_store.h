// The store of ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <mutex>

#include "chorale/transport/store/store_table.h"

namespace chorale::transport {

class MemoryStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value, Deadline deadline) override;
  std::string get(std::string_view key, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  bool contains(std::string_view key, Deadline deadline) override;
  int64_t add(std::string_view key, int64_t delta, Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override;
  bool remove(std::string_view key, Deadline deadline) override;
  std::vector<std::string> keys(std::string_view prefix, Deadline deadline) override;
  int64_t count(Deadline deadline) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  StoreTable table_;
};

}  // namespace chorale::transport
