#include "chorale/transport/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

// The log: this line, then records of {bytes of key, bytes of value or kRemoved, key, value}.
constexpr std::string_view kHeader = "chorale store 1\n";
constexpr uint32_t kRemoved = UINT32_MAX;
struct Record {
  uint32_t key_bytes;
  uint32_t value_bytes;
};

// Waiting for a lock or for a key is polling: some shared file systems have no notification across hosts.
class Backoff {
 public:
  // False when the deadline has passed.
  bool pause(Deadline deadline) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(next_, deadline.left()));
    next_ = std::min<std::chrono::microseconds>(next_ * 2, 10ms);
    return true;
  }

 private:
  std::chrono::microseconds next_ = 50us;
};

std::string trouble(const std::string& path, std::string_view what) {
  return concat("[store] file ", path, ": ", what, ": ", std::strerror(errno));
}

int open_log(const std::string& path) {
  const int file = above_standard(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  CHORALE_CHECK(file >= 0, trouble(path, "cannot open"));
  struct stat state {};
  const bool known = fstat(file, &state) == 0;
  if (known && S_ISREG(state.st_mode) && state.st_uid == geteuid()) return file;
  close(file);
  CHORALE_CHECK(known && S_ISREG(state.st_mode), "[store] ", path, " is not a regular file");
  throw InvalidArgument(concat("[store] file ", path, " belongs to user ", state.st_uid, ", not to this one (",
                               geteuid(), "); choose another path"));
}

bool read_at(int file, void* data, size_t bytes, int64_t offset) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = pread(file, to, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to += n, offset += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool write_at(int file, std::string_view data, int64_t offset) {
  while (!data.empty()) {
    const ssize_t n = pwrite(file, data.data(), data.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data.remove_prefix(static_cast<size_t>(n)), offset += n;
  }
  return true;
}

}  // namespace

FileStore::FileStore(std::string path) : path_(std::move(path)), file_(open_log(path_)) {}

FileStore::~FileStore() { close(file_); }

void FileStore::lock(std::string_view call, int kind, Deadline deadline) {
  Backoff backoff;
  while (flock(file_, kind | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) throw CommError(trouble(path_, "cannot lock"));
    if (!backoff.pause(deadline)) throw_store_timeout(call, concat("file ", path_, " (locked by another rank)"), {});
  }
}

// Runs `body` with the lock held and the table up to date.
template <class Body>
auto FileStore::locked(std::string_view call, int kind, Deadline deadline, const Body& body) {
  const std::lock_guard guard(mutex_);
  lock(call, kind, deadline);
  struct Unlock {
    int file;
    ~Unlock() { flock(file, LOCK_UN); }
  } const unlock{file_};
  replay();
  return body();
}

void FileStore::replay() {
  struct stat state {};
  if (fstat(file_, &state) != 0) throw CommError(trouble(path_, "cannot look at it"));
  if (state.st_nlink == 0) throw StoreLost(concat("[store] file ", path_, " was removed while it was in use"));
  if (end_ == 0 && state.st_size > 0) {
    std::array<char, kHeader.size()> header{};
    CHORALE_CHECK(
        read_at(file_, header.data(), header.size(), 0) && std::string_view(header.data(), header.size()) == kHeader,
        "[store] file ", path_, " is not a store; choose a path that does not exist");
    end_ = static_cast<int64_t>(header.size());
  }
  Record record{};
  std::string bytes;
  while (state.st_size - end_ >= static_cast<int64_t>(sizeof record)) {
    if (!read_at(file_, &record, sizeof record, end_)) throw CommError(trouble(path_, "cannot read"));
    const bool removed = record.value_bytes == kRemoved;
    const uint32_t value_bytes = removed ? 0 : record.value_bytes;
    if (record.key_bytes == 0 || record.key_bytes > kMaxStoreKeyBytes || value_bytes > kMaxStoreValueBytes) {
      throw CommError(concat("[store] file ", path_, " is damaged at byte ", end_));
    }
    bytes.resize(size_t{record.key_bytes} + value_bytes);
    const auto begin = end_ + static_cast<int64_t>(sizeof record);
    // The writer died before the record was whole: it does not count, and the next writer cuts it off.
    if (state.st_size - begin < static_cast<int64_t>(bytes.size())) return;
    if (!read_at(file_, bytes.data(), bytes.size(), begin)) throw CommError(trouble(path_, "cannot read"));
    const auto key = std::string_view(bytes).substr(0, record.key_bytes);
    if (removed) {
      table_.remove(key);
    } else {
      table_.set(key, std::string_view(bytes).substr(record.key_bytes));
    }
    end_ = begin + static_cast<int64_t>(bytes.size());
  }
}

// Null: the key is removed. The caller holds the exclusive lock and changes the table when this has succeeded.
void FileStore::append(std::string_view key, const std::string* value) {
  const Record record{static_cast<uint32_t>(key.size()), value ? static_cast<uint32_t>(value->size()) : kRemoved};
  std::string bytes(end_ == 0 ? kHeader : "");
  bytes.append(reinterpret_cast<const char*>(&record), sizeof record).append(key);
  if (value) bytes.append(*value);
  if (ftruncate(file_, end_) != 0 || !write_at(file_, bytes, end_)) {
    const std::string message = trouble(path_, "cannot write");
    if (ftruncate(file_, end_) != 0) throw CommError(message + " (and cannot undo)");
    throw CommError(message);
  }
  end_ += static_cast<int64_t>(bytes.size());
}

// Runs `change` on a table with this entry alone; what comes out is logged, then stored. So a change that is refused,
// or cannot be written, leaves no trace.
template <class Change>
auto FileStore::change_entry(std::string_view call, std::string_view key, Deadline deadline, const Change& change) {
  check_store_key(key);
  return locked(call, LOCK_EX, deadline, [&] {
    StoreTable entry;
    const std::string* before = table_.find(key);
    if (before) entry.set(key, *before);
    auto result = change(entry);
    const std::string* after = entry.find(key);
    if (after ? !before || *after != *before : before != nullptr) {
      append(key, after);
      if (after) {
        table_.set(key, *after);
      } else {
        table_.remove(key);
      }
    }
    return result;
  });
}

void FileStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  change_entry("set", key, deadline, [&](StoreTable& entry) {
    entry.set(key, value);
    return true;
  });
}

int64_t FileStore::add(std::string_view key, int64_t delta, Deadline deadline) {
  return change_entry("add", key, deadline, [&](StoreTable& entry) { return entry.add(key, delta); });
}

std::string FileStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                   Deadline deadline) {
  return change_entry("compare_set", key, deadline,
                      [&](StoreTable& entry) { return entry.compare_set(key, expected, desired); });
}

bool FileStore::remove(std::string_view key, Deadline deadline) {
  return change_entry("remove", key, deadline, [&](StoreTable& entry) { return entry.remove(key); });
}

bool FileStore::remove_file_if(std::string_view key, std::string_view value, Deadline deadline) {
  return locked("remove the file", LOCK_EX, deadline, [&] {
    const std::string* found = table_.find(key);
    return found && *found == value && unlink(path_.c_str()) == 0;
  });
}

// Looks again until `done` says so; the error names the keys that are missing otherwise.
template <class Done>
void FileStore::poll(std::string_view call, std::span<const std::string> keys, Deadline deadline, const Done& done) {
  for (const std::string& key : keys) check_store_key(key);
  Backoff backoff;
  while (true) {
    const std::vector<std::string> missing = locked(call, LOCK_SH, deadline, [&] {
      std::vector<std::string> names = table_.missing(keys);
      if (names.empty()) done();
      return names;
    });
    if (missing.empty()) return;
    if (!backoff.pause(deadline)) throw_store_timeout(call, "file " + path_, missing);
  }
}

std::string FileStore::get(std::string_view key, Deadline deadline) {
  std::string value;
  poll("get", std::vector{std::string(key)}, deadline, [&] { value = *table_.find(key); });
  return value;
}

void FileStore::wait(std::span<const std::string> keys, Deadline deadline) {
  poll("wait", keys, deadline, [] {});
}

bool FileStore::contains(std::string_view key, Deadline deadline) {
  check_store_key(key);
  return locked("contains", LOCK_SH, deadline, [&] { return table_.find(key) != nullptr; });
}

std::vector<std::string> FileStore::keys(std::string_view prefix, Deadline deadline) {
  return locked("keys", LOCK_SH, deadline, [&] { return table_.keys(prefix); });
}

int64_t FileStore::count(Deadline deadline) {
  return locked("count", LOCK_SH, deadline, [&] { return table_.count(); });
}

}  // namespace chorale::transport
