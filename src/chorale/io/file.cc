#include "chorale/io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/io/no_link.h"

namespace chorale::io {
namespace {

// A file descriptor that is closed with its scope.
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

void sync_folder_of(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const Descriptor opened{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  // Some file systems cannot sync a folder (EINVAL); they make renames durable on their own or not at all.
  const bool synced = opened.value >= 0 && (::fsync(opened.value) == 0 || errno == EINVAL);
  CHORALE_CHECK_STATE(synced, "cannot sync folder ", folder, ": ", std::strerror(errno));
}

// Opens a file for writing over it, if its bytes belong to nobody else: a lease for writing is refused while it is open
// or mapped anywhere, and by file systems that do not know leases. -1 otherwise.
int open_unused(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return -1;
  struct stat status {};
  const bool is_ours = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
  if (is_ours && ::fcntl(file, F_SETLEASE, F_WRLCK) == 0 && ::fcntl(file, F_SETLEASE, F_UNLCK) == 0) return file;
  ::close(file);
  return -1;
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path, bool is_read) {
  // Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
  Descriptor opened{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  CHORALE_CHECK(opened.value >= 0, "cannot read ", path, ": ", std::strerror(errno));
  struct stat status {};
  CHORALE_CHECK(::fstat(opened.value, &status) == 0, "cannot read ", path, ": ", std::strerror(errno));
  CHORALE_CHECK(S_ISREG(status.st_mode), "cannot read ", path, ": it is not a regular file");

  const std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  if (status.st_size == 0) return file;  // mmap refuses to map nothing
  const auto size = static_cast<size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, opened.value, 0);
  CHORALE_CHECK(data != MAP_FAILED, "cannot map ", path, " of ", size, " bytes: ", std::strerror(errno));
  file->data_ = static_cast<const std::byte*>(data);
  file->size_ = size;
  if (is_read) file->file_ = std::exchange(opened.value, -1);
  return file;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (file_ >= 0) ::close(file_);
}

void MappedFile::read(size_t begin, std::span<std::byte> into) const {
  CHORALE_INVARIANT(into.empty() || file_ >= 0, "a file that is read was opened for it");
  while (!into.empty()) {
    const ssize_t count = ::pread(file_, into.data(), into.size(), static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    CHORALE_CHECK(count > 0, "cannot read ", path_, ": ", count < 0 ? std::strerror(errno) : "it has become shorter");
    begin += static_cast<size_t>(count);
    into = into.subspan(static_cast<size_t>(count));
  }
}

AtomicFile::AtomicFile(std::filesystem::path path, const std::filesystem::path& spare) : path_(std::move(path)) {
  CHORALE_CHECK(path_.has_filename(), "cannot write ", path_, ": it names no file");
  // A rename would take away what is under the name: a device, a pipe, somebody's link. The file behind a link is
  // nobody's to write over either: its owner did not name it.
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::symlink_status(path_, error);
  check_is_no_link(path_);
  CHORALE_CHECK(std::filesystem::is_regular_file(status) || !std::filesystem::exists(status), "cannot write ", path_,
                ": it is not a regular file, and stays as it is");
  static std::atomic<int> count{0};
  do {
    temporary_ = path_;
    temporary_ += concat(".tmp-", ::getpid(), "-", count.fetch_add(1));
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (file_ < 0 && errno == EEXIST);  // left behind by a process that had this number
  CHORALE_CHECK(file_ >= 0, "cannot write ", path_, ": ", std::strerror(errno));
  if (spare.empty()) return;
  const int reused = open_unused(spare);
  if (reused >= 0 && ::rename(spare.c_str(), temporary_.c_str()) == 0) {
    ::close(std::exchange(file_, reused));
    is_spare_ = true;
    return;
  }
  if (reused >= 0) ::close(reused);
  ::unlink(spare.c_str());
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux writes less than 2 GiB in one call
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), std::min(bytes.size(), kMostAtOnce));
    if (written < 0 && errno == EINTR) continue;
    CHORALE_CHECK_STATE(written >= 0, "cannot write ", path_, ": ", std::strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  if (is_spare_) {
    const bool cut = ::ftruncate(file_, ::lseek(file_, 0, SEEK_CUR)) == 0;
    CHORALE_CHECK_STATE(cut, "cannot write ", path_, ": ", std::strerror(errno));
  }
  CHORALE_CHECK_STATE(::fsync(file_) == 0, "cannot write ", path_, ": ", std::strerror(errno));
  CHORALE_CHECK_STATE(::rename(temporary_.c_str(), path_.c_str()) == 0, "cannot write ", path_, ": ",
                      std::strerror(errno));
  ::close(std::exchange(file_, -1));
  sync_folder_of(path_);
}

void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to) {
  CHORALE_CHECK_STATE(::rename(from.c_str(), to.c_str()) == 0, "cannot rename ", from, " to ", to, ": ",
                      std::strerror(errno));
  sync_folder_of(to);
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace chorale::io
