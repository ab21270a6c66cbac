// A store in a file that all ranks can reach: a log of changes, appended under an exclusive lock and replayed by every
// reader. It serves one host, or a file system that several hosts share and that has working locks.
#pragma once

#include <mutex>
#include <string>

#include "chorale/transport/store/store_table.h"

namespace chorale::transport {

// The file is made when it does not exist, readable by its owner only; one that belongs to another user is refused. It
// stays when the store goes, unless remove_file_if() was called. A writer that dies in
// the middle of a change leaves the store as it was before.
class FileStore final : public Store {
 public:
  explicit FileStore(std::string path);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

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

  // The last rank that leaves calls it: removes the file if this is the entry's value. Any other rank that has it open
  // gets a StoreLost from then on.
  bool remove_file_if(std::string_view key, std::string_view value, Deadline deadline);

 private:
  template <class Body>
  auto locked(std::string_view call, int kind, Deadline deadline, const Body& body);
  template <class Change>
  auto change_entry(std::string_view call, std::string_view key, Deadline deadline, const Change& change);
  template <class Done>
  void poll(std::string_view call, std::span<const std::string> keys, Deadline deadline, const Done& done);
  void lock(std::string_view call, int kind, Deadline deadline);
  void replay();
  void append(std::string_view key, const std::string* value);

  const std::string path_;
  const int file_;
  std::mutex mutex_;  // the lock of the file is per open file, not per thread
  StoreTable table_;  // the log up to end_
  int64_t end_ = 0;
};

}  // namespace chorale::transport
