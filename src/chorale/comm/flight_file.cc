#include "chorale/comm/flight_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <ios>
#include <mutex>
#include <string_view>
#include <utility>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

namespace fs = std::filesystem;

// Writes a file that was not there, with a name between the two that nobody can guess: the folder may be one that all
// users share, where somebody could have put a link in its place. Returns its path, or nothing when that failed.
std::string write_new_file(const std::string& before, const std::string& after, std::string_view text) {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) return {};
  const std::string path = concat(before, std::hex, number, after);
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return {};
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    text.remove_prefix(static_cast<size_t>(written));
  }
  close(file);
  if (text.empty()) return path;
  unlink(path.c_str());
  return {};
}

// A folder that only this user can read, made by this rank or by another of the job. Somebody else's, or a link, is
// none.
bool make_private(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) == 0) return true;
  struct stat found {};
  return errno == EEXIST && lstat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == geteuid() &&
         (found.st_mode & 077) == 0;
}

// The records that this process has written, oldest first, and what happened to the job.
class Records {
 public:
  static Records& of_process() {
    static auto* const records = new Records;  // a record may be written while statics are destroyed
    return *records;
  }

  void name_job(const std::string& name) {
    const std::lock_guard lock(mutex_);
    forget_parent();
    if (job_.empty()) job_ = name;
  }
  std::string job() {
    const std::lock_guard lock(mutex_);
    forget_parent();
    return job_.empty() ? concat("p", getpid()) : job_;
  }

  void note(const std::string& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    if (events_.size() > kMostEvents) events_.pop_front();
  }
  std::vector<std::string> events() {
    const std::lock_guard lock(mutex_);
    return {events_.begin(), events_.end()};
  }

  // `goes`: when this process ends well.
  void add(std::string path, bool goes) {
    const std::lock_guard lock(mutex_);
    forget_parent();
    if (goes && !std::exchange(tidies_, true)) on_exit([](int status, void*) { tidy_flights(status); }, nullptr);
    records_.push_back({std::move(path), goes});
    if (records_.size() <= kMostRecords) return;
    unlink(records_.front().path.c_str());
    records_.pop_front();
  }

  void tidy() {
    const std::lock_guard lock(mutex_);
    forget_parent();
    for (const Record& record : records_) {
      if (!record.goes) continue;
      unlink(record.path.c_str());
      rmdir(fs::path(record.path).parent_path().c_str());  // fails while another rank has records there
    }
    std::erase_if(records_, [](const Record& record) { return record.goes; });
  }

 private:
  struct Record {
    std::string path;
    bool goes;
  };

  // What a forked child has of its parent's is not its own.
  void forget_parent() {
    if (process_ == getpid()) return;
    process_ = getpid();
    job_.clear();
    records_.clear();
  }

  std::mutex mutex_;
  pid_t process_ = getpid();
  bool tidies_ = false;
  std::string job_;
  std::deque<std::string> events_;
  std::deque<Record> records_;
};

}  // namespace

void name_job(const std::string& name) { Records::of_process().name_job(name); }

void note_event(const std::string& text) { Records::of_process().note(text); }
std::vector<std::string> noted_events() { return Records::of_process().events(); }

void tidy_flights(int status) noexcept {
  try {
    if (status == 0) Records::of_process().tidy();
  } catch (...) {
  }
}

std::string write_flight(int rank, const std::string& text) noexcept {
  try {
    std::string folder = config::env("CHORALE_FLIGHT_DIR").value_or("");
    const bool of_job = folder.empty();
    if (of_job) {
      folder = fs::temp_directory_path() / concat("chorale-flights-", Records::of_process().job());
      if (!make_private(folder)) return {};
    }
    std::string path =
        write_new_file(concat(folder, "/chorale-flight-", getpid(), "-"), concat("-rank", rank, ".json"), text);
    if (!path.empty()) Records::of_process().add(path, of_job);
    return path;
  } catch (...) {
    return {};
  }
}

}  // namespace chorale::comm
