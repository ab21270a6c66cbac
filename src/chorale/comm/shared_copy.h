// Copies into memory that other processes have read.
//
// Note [Memory that others have read]
// A buffer that was lent to another process (Note [Lent parcels]) is used again when it comes back. The other process's
// core may still have its lines in its cache, and where the two cores share none, each line that is written has to be
// taken away from there first: 1 MiB then takes 500 us instead of 25 (two cores of a virtual EPYC). Stores that go
// past the caches take 40 us, wherever the lines are; but where nobody has them, or the cores share a cache, ordinary
// ones are twice as fast, and so is the reading of what they wrote. A host may move the cores of a virtual machine at
// any time, so that one machine is of either kind. So the first part of a copy is ordinary and timed, and decides about
// the rest.
#pragma once

#include <cstddef>

namespace chorale::comm {

void copy_shared(std::byte* to, const std::byte* from, size_t bytes);
// Copies data of this core's own into memory that others have read and will read. Small copies are timed, too, because
// a slow one tells of `to`, not of `from`: up to 64 KiB one in 64 of a thread, and those after it are done likewise.
void copy_for_others(std::byte* to, const std::byte* from, size_t bytes);

// The two ways. The second one is for memory that the writer does not read soon.
inline constexpr size_t kTriedBytes = 16 << 10;
void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace chorale::comm
