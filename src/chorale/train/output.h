// What long work prints. A file that does not take it (a full disk) is no reason to stop: there is one warning, and
// the caller that started the work hears at its end that something is missing.
#pragma once

#include <cstdio>
#include <string_view>

namespace chorale::train {

class Output {
 public:
  // The file must outlive it.
  explicit Output(std::FILE* file) : file_(file) {}

  // Writes and flushes. StateError when nobody reads any more (EPIPE): such a job ends.
  void print(std::string_view text);
  bool has_failed() const { return failed_; }
  // The file, for what one asks of a terminal.
  std::FILE* file() const { return file_; }

 private:
  std::FILE* file_;
  bool failed_ = false;
};

}  // namespace chorale::train
