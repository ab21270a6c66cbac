#include "chorale/io/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/io/no_link.h"

namespace chorale::io {

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
  check_is_no_link(path_);
  // Without O_NONBLOCK, opening a pipe that nobody reads would wait for ever.
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0666);
  CHORALE_CHECK(file_ >= 0, "cannot write ", path_, ": ", std::strerror(errno));
  struct stat status {};
  const bool is_regular = ::fstat(file_, &status) == 0 && S_ISREG(status.st_mode);
  if (!is_regular) ::close(file_);
  CHORALE_CHECK(is_regular, "cannot write ", path_, ": it is not a regular file");
  size_ = static_cast<size_t>(status.st_size);
}

AppendFile::~AppendFile() {
  if (!flush()) lost_bytes_ += kept_.size();
  if (has_lost()) log_warning(concat(path_.string(), " lacks ", lost_bytes_, " bytes that could not be written"));
  ::close(file_);
}

void AppendFile::add(std::string_view record) {
  if (kept_.size() + record.size() > kMostKept && !flush()) {
    lost_bytes_ += record.size();
    return;
  }
  kept_ += record;
}

bool AppendFile::flush() {
  for (size_t done = 0; done < kept_.size();) {
    const ssize_t written = ::write(file_, kept_.data() + done, kept_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      // Half a record is taken back. If even that fails, readers of the file find a damaged line.
      if (done > 0 && ::ftruncate(file_, static_cast<off_t>(size_)) != 0) size_ += done;
      if (!warned_)
        log_warning(concat("cannot write ", path_.string(), ": ", std::strerror(error),
                           "; what belongs there is kept in memory, and written when that is possible again"));
      warned_ = true;
      return false;
    }
    done += static_cast<size_t>(written);
  }
  size_ += kept_.size();
  kept_.clear();
  return true;
}

}  // namespace chorale::io
