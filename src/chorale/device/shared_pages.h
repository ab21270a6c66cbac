// Arenas in one sparse memfd that other processes can map (allocator.h, shared_pages()).
//
// Note [Forked children]
// fork() would leave parent and child writing into the same pages. A child therefore gets private copies of all arenas
// before fork() returns in either of them: the parent waits, so that the copy is of one moment. The child's new arenas
// go to a file of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "chorale/device/allocator.h"

namespace chorale {

class SharedPages final : public memory::ArenaSource {
 public:
  SharedPages();
  ~SharedPages() override;
  memory::Arena acquire(size_t bytes) override;
  void release(const memory::Arena& arena) noexcept override;
  int shared_descriptor() const override { return descriptor_; }

  // Where [begin, begin + bytes) of the arena lies in the file; nothing if it is not one stretch there.
  std::optional<uint64_t> offset_of(const memory::Arena& arena, const std::byte* begin, size_t bytes) const;

  // Puts fresh pages with the same contents under the whole pages that [begin, begin + bytes) touches. A peer that
  // mapped the old ones can no longer read or write what is seen here. No thread may use these pages meanwhile. Throws
  // StateError when there is no memory.
  void renew(std::byte* begin, size_t bytes);

  // Puts huge pages under the 2 MiB that [begin, begin + bytes) touches, where there are none yet and the kernel gives
  // some; contents are kept. It would not do so by itself: shared memory is excepted on most systems, and a training
  // step then spends several per cent of its time on entries of page tables.
  void make_huge(const std::byte* begin, size_t bytes) noexcept;

  // Around fork(), called by the owner under its own lock (Note [Forked children]).
  void before_fork();
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  struct Renewed {
    size_t bytes;
    uint64_t offset;
  };
  uint64_t grow(size_t bytes);
  void make_private(const memory::Arena& arena) const noexcept;

  int descriptor_;
  mutable std::mutex mutex_;  // guards what follows
  uint64_t end_ = 0;
  std::map<const std::byte*, memory::Arena> arenas_;  // those in the file
  std::set<uintptr_t> huge_;                          // addresses, by 2 MiB, that were made huge or could not be
  int pipe_[2] = {-1, -1};                            // closed by the child when it has its copies
  std::atomic<bool> any_moved_{false};                // saves the lock in a process where nothing ever failed
  std::map<const std::byte*, Renewed> renewed_;       // stretches that do not lie where their arena says; disjoint
};

}  // namespace chorale
