#include "chorale/device/shared_pages.h"

#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"
#include "chorale/device/allocator.h"

namespace chorale {
namespace {

// Address space of `bytes` aligned to kArenaBytes, without access yet.
std::byte* reserve_aligned(size_t bytes) {
  const size_t total = bytes + memory::kArenaBytes;
  void* raw = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHORALE_CHECK_STATE(raw != MAP_FAILED, "[allocator] cannot reserve ", bytes,
                      " bytes of address space: ", std::strerror(errno), "; is a limit set (ulimit -v)?");
  auto* first = static_cast<std::byte*>(raw);
  const size_t skip =
      (memory::kArenaBytes - reinterpret_cast<uintptr_t>(first) % memory::kArenaBytes) % memory::kArenaBytes;
  if (skip > 0) munmap(first, skip);
  munmap(first + skip + bytes, memory::kArenaBytes - skip);
  return first + skip;
}

class PrivatePages final : public memory::ArenaSource {
 public:
  memory::Arena acquire(size_t bytes) override {
    std::byte* base = reserve_aligned(bytes);
    if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) {
      const int error = errno;
      munmap(base, bytes);
      throw StateError(concat("[allocator] out of memory: cannot get ", bytes, " bytes: ", std::strerror(error)));
    }
    madvise(base, bytes, MADV_HUGEPAGE);  // fewer page faults; harmless where there are no huge pages
    return {base, bytes, 0};
  }
  void release(const memory::Arena& arena) noexcept override { munmap(arena.base, arena.bytes); }
};

}  // namespace

namespace {
// Its size can only grow: a peer that has looked whether a tensor lies in it never reads behind its end.
int make_arena_file() {
  const int file = above_standard(memfd_create("chorale-arenas", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file >= 0) fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL);
  return file;
}
}  // namespace

SharedPages::SharedPages() : descriptor_(make_arena_file()) {
  CHORALE_CHECK_STATE(descriptor_ >= 0, "[allocator] memfd_create failed: ", std::strerror(errno));
}
SharedPages::~SharedPages() { close(descriptor_); }

uint64_t SharedPages::grow(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t offset = end_;
  // The file is sparse: its size costs nothing until pages are touched.
  CHORALE_CHECK_STATE(ftruncate(descriptor_, static_cast<off_t>(offset + bytes)) == 0,
                      "[allocator] cannot grow the shared arena to ", offset + bytes, " bytes: ", std::strerror(errno));
  end_ += bytes;
  return offset;
}

memory::Arena SharedPages::acquire(size_t bytes) {
  const uint64_t offset = grow(bytes);
  std::byte* base = reserve_aligned(bytes);
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor_, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    const int error = errno;
    munmap(base, bytes);
    throw StateError(concat("[allocator] cannot map ", bytes, " bytes of shared memory: ", std::strerror(error)));
  }
  madvise(base, bytes, MADV_HUGEPAGE);
  const std::lock_guard lock(mutex_);
  return arenas_[base] = {base, bytes, offset};
}

void SharedPages::make_huge(const std::byte* begin, size_t bytes) noexcept {
  constexpr int kPopulateWrite = 23, kCollapse = 25;  // of madvise, since Linux 5.14 and 6.1
  constexpr size_t kHugeBytes = size_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  for (uintptr_t at = address / kHugeBytes * kHugeBytes; at < address + bytes; at += kHugeBytes) {
    if (!huge_.insert(at).second) continue;
    auto* piece = reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
    // Nothing is collapsed where no page is.
    if (madvise(piece, memory::kPageBytes, kPopulateWrite) == 0) madvise(piece, kHugeBytes, kCollapse);
  }
}

void SharedPages::release(const memory::Arena& arena) noexcept {
  munmap(arena.base, arena.bytes);
  const std::lock_guard lock(mutex_);
  const auto base = reinterpret_cast<uintptr_t>(arena.base);
  huge_.erase(huge_.lower_bound(base), huge_.lower_bound(base + arena.bytes));
  if (arenas_.erase(arena.base) == 0) return;  // inherited from a parent process
  // Ranges of the file are not reused, so a peer's old mapping can never show another tensor.
  const auto punch = [&](uint64_t offset, size_t bytes) {
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
  };
  punch(arena.source_offset, arena.bytes);
  const auto first = renewed_.lower_bound(arena.base), last = renewed_.lower_bound(arena.base + arena.bytes);
  for (auto at = first; at != last; ++at) punch(at->second.offset, at->second.bytes);
  renewed_.erase(first, last);
}

std::optional<uint64_t> SharedPages::offset_of(const memory::Arena& arena, const std::byte* begin, size_t bytes) const {
  const std::byte* end = begin + bytes;
  if (begin < arena.base || end > arena.base + arena.bytes) return std::nullopt;
  const uint64_t plain = arena.source_offset + static_cast<uint64_t>(begin - arena.base);
  if (!any_moved_.load(std::memory_order_acquire)) [[likely]]
    return plain;
  const std::lock_guard lock(mutex_);
  if (!arenas_.contains(arena.base)) return std::nullopt;
  auto next = renewed_.upper_bound(begin);
  if (next != renewed_.begin()) {
    const auto& [base, stretch] = *std::prev(next);
    if (begin < base + stretch.bytes) {
      if (end > base + stretch.bytes) return std::nullopt;
      return stretch.offset + static_cast<uint64_t>(begin - base);
    }
  }
  if (next != renewed_.end() && next->first < end) return std::nullopt;
  return plain;
}

void SharedPages::renew(std::byte* begin, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  std::byte* first = begin - address % memory::kPageBytes;
  const size_t length =
      (static_cast<size_t>(begin + bytes - first) + memory::kPageBytes - 1) / memory::kPageBytes * memory::kPageBytes;
  const uint64_t offset = grow(length);
  void* fresh = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, static_cast<off_t>(offset));
  CHORALE_CHECK_STATE(fresh != MAP_FAILED, "[allocator] cannot map ", length,
                      " fresh bytes of shared memory: ", std::strerror(errno));
  // The pages belong to this block alone, and behind its last byte AddressSanitizer guards the rest of the last one.
  ASAN_UNPOISON_MEMORY_REGION(first, length);
  std::memcpy(fresh, first, length);
  // One step: at no moment is there nothing at these addresses.
  CHORALE_CHECK_STATE(mremap(fresh, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, first) != MAP_FAILED,
                      "[allocator] cannot replace ", length, " bytes of shared memory: ", std::strerror(errno));
  const std::lock_guard lock(mutex_);
  // What was renewed before and is renewed again in part keeps its other parts.
  auto at = renewed_.upper_bound(first);
  if (at != renewed_.begin()) --at;
  while (at != renewed_.end() && at->first < first + length) {
    const auto [base, stretch] = *at;
    const std::byte* end = base + stretch.bytes;
    if (end <= first) {
      ++at;
      continue;
    }
    at = renewed_.erase(at);
    if (base < first) renewed_.emplace(base, Renewed{static_cast<size_t>(first - base), stretch.offset});
    if (end > first + length) {
      renewed_.emplace(first + length, Renewed{static_cast<size_t>(end - (first + length)),
                                               stretch.offset + static_cast<uint64_t>(first + length - base)});
    }
  }
  renewed_.emplace(first, Renewed{length, offset});
  any_moved_.store(true, std::memory_order_release);
}

// ---- fork

void SharedPages::before_fork() {
  mutex_.lock();
  if (pipe2(pipe_, O_CLOEXEC) != 0) pipe_[0] = pipe_[1] = -1;
  for (int& end : pipe_) end = above_standard(end);
}

void SharedPages::after_fork_in_parent() noexcept {
  if (pipe_[0] >= 0) {
    close(pipe_[1]);
    char none;
    // The end of the file comes when the child has closed its end, or is dead.
    while (read(pipe_[0], &none, 1) < 0 && errno == EINTR) {
    }
    close(pipe_[0]);
  }
  mutex_.unlock();
}

// Only system calls that are allowed in the child of a process with threads. Without memory there is no child.
void SharedPages::make_private(const memory::Arena& arena) const noexcept {
  void* raw = mmap(nullptr, arena.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) _exit(1);
  auto* copy = static_cast<std::byte*>(raw);
  const auto copy_stretch = [&](std::byte* to, size_t bytes, off_t from) {
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = pread(descriptor_, to + done, bytes - done, from + static_cast<off_t>(done));
      if (n <= 0 && errno != EINTR) _exit(1);
      if (n > 0) done += static_cast<size_t>(n);
    }
  };
  // Pages that were never touched are holes in the file.
  const auto begin = static_cast<off_t>(arena.source_offset), end = begin + static_cast<off_t>(arena.bytes);
  for (off_t at = lseek(descriptor_, begin, SEEK_DATA); at >= 0 && at < end;) {
    const off_t hole = lseek(descriptor_, at, SEEK_HOLE);
    const off_t stop = hole < 0 || hole > end ? end : hole;
    copy_stretch(copy + (at - begin), static_cast<size_t>(stop - at), at);
    at = lseek(descriptor_, stop, SEEK_DATA);
  }
  const auto last = renewed_.lower_bound(arena.base + arena.bytes);
  for (auto moved = renewed_.lower_bound(arena.base); moved != last; ++moved)
    copy_stretch(copy + (moved->first - arena.base), moved->second.bytes, static_cast<off_t>(moved->second.offset));
  if (mremap(raw, arena.bytes, arena.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, arena.base) == MAP_FAILED) _exit(1);
}

void SharedPages::after_fork_in_child() noexcept {
  for (const auto& entry : arenas_) make_private(entry.second);
  arenas_.clear();
  renewed_.clear();
  any_moved_.store(true, std::memory_order_release);
  close(descriptor_);
  descriptor_ = make_arena_file();
  end_ = 0;
  if (pipe_[0] >= 0) {
    close(pipe_[0]);
    close(pipe_[1]);
  }
  mutex_.unlock();
}

std::unique_ptr<memory::ArenaSource> private_pages() { return std::make_unique<PrivatePages>(); }
std::unique_ptr<memory::ArenaSource> shared_pages() { return std::make_unique<SharedPages>(); }

}  // namespace chorale
