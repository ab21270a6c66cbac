#include "chorale/transport/shm/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"

namespace chorale::transport::shm {
namespace {

struct Stat {
  char state = 0;  // 0: there is no such process
  uint64_t start_time = 0;
};

Stat read_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // The second field is the program's name in parentheses and may hold anything, parentheses too.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  return stat;
}

std::string proc_path(const SharedFile& file) { return concat("/proc/", file.owner.pid, "/fd/", file.descriptor); }

// A descriptor of our own for the file.
int open_shared(const SharedFile& file, Access access = Access::kWrite) {
  const int mode = access == Access::kRead ? O_RDONLY : O_RDWR;
  const int descriptor = above_standard(::open(proc_path(file).c_str(), mode | O_CLOEXEC));
  const int error = errno;
  struct stat found {};
  if (descriptor >= 0 && fstat(descriptor, &found) == 0 && found.st_ino == file.inode &&
      read_stat(file.owner.pid).start_time == file.owner.start_time) {
    return descriptor;
  }
  if (descriptor >= 0) close(descriptor);
  throw CommError(concat("[shm] cannot open the shared memory of process ", file.owner.pid, " (", proc_path(file),
                         "): ", descriptor >= 0 ? "it is another file by now" : std::strerror(error),
                         "; has that rank ended, or does it run as another user or in another PID namespace?"));
}

// One object per key for the whole process, as long as somebody holds it.
template <class Key, class T>
class Registry {
 public:
  template <class Make>
  std::shared_ptr<T> find(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    std::weak_ptr<T>& entry = entries_[key];
    if (auto found = entry.lock()) return found;
    try {
      std::shared_ptr<T> made = make();
      entry = made;
      return made;
    } catch (...) {
      entries_.erase(key);
      throw;
    }
  }
  void forget(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end() && found->second.expired()) entries_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<T>> entries_;
};
// Never destroyed: groups in static storage may go after everything else.
auto& processes() {
  static auto* const registry = new Registry<ProcessId, PeerProcess>;
  return *registry;
}
auto& memories() {
  static auto* const registry = new Registry<std::pair<SharedFile, Access>, PeerMemory>;
  return *registry;
}
auto& segments() {
  static auto* const registry = new Registry<SharedFile, Segment>;
  return *registry;
}

}  // namespace

const ProcessId& this_process() {
  // Asked again after a fork: the child is another process.
  thread_local ProcessId id;
  const int64_t pid = getpid();
  if (id.pid != pid) id = {pid, read_stat(pid).start_time};
  return id;
}

bool is_running(const ProcessId& id) {
  const Stat stat = read_stat(id.pid);
  return stat.state != 0 && stat.state != 'Z' && stat.state != 'X' && stat.start_time == id.start_time;
}

SharedFile shared_file(int descriptor) {
  struct stat found {};
  CHORALE_CHECK_STATE(fstat(descriptor, &found) == 0, "[shm] descriptor ", descriptor, ": ", std::strerror(errno));
  return {this_process(), descriptor, found.st_ino};
}

// ---- processes

std::shared_ptr<PeerProcess> PeerProcess::find(const ProcessId& id) {
  return processes().find(id, [&] { return std::shared_ptr<PeerProcess>(new PeerProcess(id)); });
}

PeerProcess::PeerProcess(const ProcessId& id)
    : id_(id), descriptor_(above_standard(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(id.pid), 0)))) {
  const int error = errno;
  // This order proves it: the process that the descriptor means has this start time, or has ended by now.
  if (descriptor_ >= 0 && read_stat(id.pid).start_time == id.start_time) return;
  if (descriptor_ >= 0) close(descriptor_);
  throw CommError(concat("[shm] process ", id.pid, " of a peer is not there",
                         descriptor_ < 0 ? concat(": ", std::strerror(error)) : std::string(),
                         "; did it end already?"));
}
PeerProcess::~PeerProcess() {
  close(descriptor_);
  processes().forget(id_);
}

bool PeerProcess::alive() const {
  pollfd poll_one{descriptor_, POLLIN, 0};
  return poll(&poll_one, 1, 0) == 0;
}

std::string PeerProcess::condition() const {
  const Stat stat = read_stat(id_.pid);
  if (stat.start_time != id_.start_time) return "gone";
  switch (stat.state) {
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "waiting for a disk or a device";
    case 'T':
      return "stopped by a signal";
    case 't':
      return "stopped by a debugger";
    default:
      return "gone";
  }
}

// ---- memory

std::shared_ptr<PeerMemory> PeerMemory::open(const SharedFile& file, Access access) {
  return memories().find({file, access}, [&] {
    return std::shared_ptr<PeerMemory>(new PeerMemory(file, access, open_shared(file, access)));
  });
}
PeerMemory::~PeerMemory() {
  for (const Extent& extent : extents_) munmap(extent.base, extent.end - extent.begin);
  close(descriptor_);
  memories().forget({file_, access_});
}

PeerMemory::Extent PeerMemory::map(uint64_t offset, size_t bytes) {
  // Whole arenas: neighbours of a tensor will be asked for too.
  constexpr uint64_t kStep = uint64_t{64} << 20;
  const std::lock_guard lock(mutex_);
  for (const Extent& extent : extents_) {
    if (extent.holds(offset, bytes)) return extent;
  }
  // Otherwise the owner could take away what was looked at.
  const int seals = fcntl(descriptor_, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw CommError(concat("[shm] the shared memory of process ", file_.owner.pid,
                           " is not sealed against shrinking; do all ranks run the same version?"));
  struct stat found {};
  const bool known = fstat(descriptor_, &found) == 0;
  const auto size = known ? static_cast<uint64_t>(found.st_size) : 0;
  if (offset > size || bytes > size - offset) {
    throw CommError(concat("[shm] process ", file_.owner.pid, " names ", bytes, " bytes at ", offset,
                           " of its shared memory, which has ", size));
  }
  const uint64_t begin = offset / kStep * kStep;
  const uint64_t end = std::min((offset + bytes + kStep - 1) / kStep * kStep, size);
  const int protection = access_ == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = mmap(nullptr, end - begin, protection, MAP_SHARED, descriptor_, static_cast<off_t>(begin));
  if (base == MAP_FAILED) {
    throw CommError(
        concat("[shm] cannot map ", end - begin, " bytes of process ", file_.owner.pid, ": ", std::strerror(errno)));
  }
  extents_.push_back({begin, end, static_cast<std::byte*>(base)});
  return extents_.back();
}

Segment::Segment(const SharedFile& file, int descriptor, size_t bytes)
    : file_(file), descriptor_(descriptor), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    throw CommError(concat("[shm] cannot map a segment of ", bytes, " bytes: ", std::strerror(error)));
  }
  data_ = static_cast<std::byte*>(data);
}
Segment::~Segment() {
  munmap(data_, bytes_);
  close(descriptor_);
  segments().forget(file_);
}

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  const int descriptor = above_standard(memfd_create("chorale-group", MFD_CLOEXEC));
  CHORALE_CHECK_STATE(descriptor >= 0, "[shm] memfd_create failed: ", std::strerror(errno));
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(descriptor);
    throw StateError(concat("[shm] cannot make a segment of ", bytes, " bytes: ", std::strerror(error)));
  }
  const SharedFile file = shared_file(descriptor);
  return segments().find(file, [&] { return std::shared_ptr<Segment>(new Segment(file, descriptor, bytes)); });
}

std::shared_ptr<Segment> Segment::attach(const SharedFile& file, size_t bytes) {
  return segments().find(file, [&] {
    const int descriptor = open_shared(file);
    struct stat found {};
    if (fstat(descriptor, &found) != 0 || static_cast<size_t>(found.st_size) != bytes) {
      close(descriptor);
      throw CommError(concat("[shm] the segment of process ", file.owner.pid, " has ", found.st_size, " bytes where ",
                             bytes, " were announced"));
    }
    return std::shared_ptr<Segment>(new Segment(file, descriptor, bytes));
  });
}

}  // namespace chorale::transport::shm
