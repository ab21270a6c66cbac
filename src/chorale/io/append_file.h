// A file that grows by whole records: lines of a log, events.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace chorale::io {

// What the system does not take (a full disk, a quota) is kept and tried again with the next record, after one warning;
// the file never ends in half a record. When more than kMostKept bytes are kept, the newest are dropped, as whole
// records.
class AppendFile {
 public:
  static constexpr size_t kMostKept = size_t{16} << 20;

  // Made if need be. InvalidArgument when it cannot be written, or is no regular file.
  explicit AppendFile(std::filesystem::path path);
  // Tries once more; what is lost then is said.
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void add(std::string_view record);
  // False as long as something is kept.
  bool flush();
  // Records that were dropped, or could not be written in the end.
  bool has_lost() const { return lost_bytes_ > 0; }

 private:
  std::filesystem::path path_;
  int file_ = -1;
  size_t size_ = 0;  // of the file, in whole records
  std::string kept_;
  size_t lost_bytes_ = 0;
  bool warned_ = false;
};

}  // namespace chorale::io
