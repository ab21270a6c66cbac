#include "chorale/device/sim/sim_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "chorale/base/error.h"

namespace chorale::sim {

SimMemory::SimMemory(size_t bytes, bool closed)
    : bytes_((bytes + memory::kPageBytes - 1) / memory::kPageBytes * memory::kPageBytes) {
  const int file = ::memfd_create("chorale-sim", MFD_CLOEXEC);
  CHORALE_CHECK_STATE(file >= 0, "cannot make memory for a simulated device: ", std::strerror(errno));
  const bool sized = ::ftruncate(file, static_cast<off_t>(bytes_)) == 0;
  const auto map = [&](int access) { return ::mmap(nullptr, bytes_, access, MAP_SHARED | MAP_NORESERVE, file, 0); };
  void* first = sized ? map(closed ? PROT_NONE : PROT_READ | PROT_WRITE) : MAP_FAILED;
  void* second = sized ? map(PROT_READ | PROT_WRITE) : MAP_FAILED;
  const int error = errno;
  ::close(file);
  CHORALE_CHECK_STATE(first != MAP_FAILED && second != MAP_FAILED, "cannot map ", bytes_,
                      " bytes for a simulated device: ", std::strerror(error));
  first_ = static_cast<std::byte*>(first);
  second_ = static_cast<std::byte*>(second);
}

SimMemory::~SimMemory() {
  ::munmap(first_, bytes_);
  ::munmap(second_, bytes_);
}

void SimMemory::grow(size_t bytes) {
  CHORALE_CHECK_STATE(bytes <= bytes_, "a simulated device has ", bytes_, " bytes of memory, and ", bytes,
                      " are needed");
}

void SimMemory::close(const void* address, size_t bytes) { protect(address, bytes, 1); }
void SimMemory::reopen(const void* address, size_t bytes) { protect(address, bytes, -1); }

void SimMemory::protect(const void* address, size_t bytes, int by) {
  if (bytes == 0) return;
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(address) - first_);
  const std::lock_guard lock(mutex_);
  for (size_t page = offset / memory::kPageBytes; page <= (offset + bytes - 1) / memory::kPageBytes; ++page) {
    int& count = closed_[page];
    const int before = std::exchange(count, count + by);
    if (count == 0) closed_.erase(page);
    if ((before == 0) == (before + by == 0)) continue;
    const int access = by > 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
    CHORALE_INVARIANT(::mprotect(first_ + page * memory::kPageBytes, memory::kPageBytes, access) == 0,
                      std::strerror(errno));
  }
}

}  // namespace chorale::sim
