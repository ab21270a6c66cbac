#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/device/allocator.h"

namespace chorale {
namespace {

// Address space of `bytes` aligned to kArenaBytes, without access yet.
std::byte* reserve_aligned(size_t bytes) {
  const size_t total = bytes + kArenaBytes;
  void* raw = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHORALE_CHECK_STATE(raw != MAP_FAILED, "[allocator] cannot reserve ", bytes,
                      " bytes of address space: ", std::strerror(errno), "; is a limit set (ulimit -v)?");
  auto* first = static_cast<std::byte*>(raw);
  const size_t skip = (kArenaBytes - reinterpret_cast<uintptr_t>(first) % kArenaBytes) % kArenaBytes;
  if (skip > 0) munmap(first, skip);
  munmap(first + skip + bytes, kArenaBytes - skip);
  return first + skip;
}

class PrivatePages final : public ArenaSource {
 public:
  Arena acquire(size_t bytes) override {
    std::byte* base = reserve_aligned(bytes);
    if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) {
      const int error = errno;
      munmap(base, bytes);
      throw StateError(concat("[allocator] out of memory: cannot get ", bytes, " bytes: ", std::strerror(error)));
    }
    madvise(base, bytes, MADV_HUGEPAGE);  // fewer page faults; harmless where there are no huge pages
    return {base, bytes, 0};
  }
  void release(const Arena& arena) noexcept override { munmap(arena.base, arena.bytes); }
};

class SharedPages final : public ArenaSource {
 public:
  SharedPages() : descriptor_(memfd_create("chorale-arenas", MFD_CLOEXEC)) {
    CHORALE_CHECK_STATE(descriptor_ >= 0, "[allocator] memfd_create failed: ", std::strerror(errno));
  }
  ~SharedPages() override { close(descriptor_); }

  Arena acquire(size_t bytes) override {
    const uint64_t offset = end_;
    // The file is sparse: its size costs nothing until pages are touched.
    CHORALE_CHECK_STATE(ftruncate(descriptor_, static_cast<off_t>(offset + bytes)) == 0,
                        "[allocator] cannot grow the shared arena to ", offset + bytes,
                        " bytes: ", std::strerror(errno));
    std::byte* base = reserve_aligned(bytes);
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor_, static_cast<off_t>(offset)) ==
        MAP_FAILED) {
      const int error = errno;
      munmap(base, bytes);
      throw StateError(concat("[allocator] cannot map ", bytes, " bytes of shared memory: ", std::strerror(error)));
    }
    madvise(base, bytes, MADV_HUGEPAGE);
    end_ += bytes;
    return {base, bytes, offset};
  }
  void release(const Arena& arena) noexcept override {
    munmap(arena.base, arena.bytes);
    // The range of the file is not reused, so a peer's old mapping can never show another tensor.
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(arena.source_offset),
              static_cast<off_t>(arena.bytes));
  }
  int shared_descriptor() const override { return descriptor_; }

 private:
  int descriptor_;
  uint64_t end_ = 0;
};

}  // namespace

std::unique_ptr<ArenaSource> private_pages() { return std::make_unique<PrivatePages>(); }
std::unique_ptr<ArenaSource> shared_pages() { return std::make_unique<SharedPages>(); }

}  // namespace chorale
