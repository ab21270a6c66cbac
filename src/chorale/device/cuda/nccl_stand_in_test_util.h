// A library for tests that has NCCL's functions between threads of this process, for the rehearsal, in which the memory
// of a device is the host's. A call ends when all ranks of a communicator have made it; it looks at no stream. It fails
// where NCCL's own rules are broken (ranks that ask for different things, communicators that would block), and where a
// test wants it to.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace chorale::cuda {

struct NcclStandIn {
  // What goes wrong, with which rank, by the number of its call in a communicator, from 1 on; 0: nothing.
  int rank = 1;
  int hangs_at = 0;      // it never comes to this call
  int fails_at = 0;      // ncclCommGetAsyncError says so from this call on
  bool no_init = false;  // it never comes to the meeting
  std::atomic<int> begun = 0, aborted = 0, destroyed = 0, calls = 0, made_ids = 0, scaled = 0;

  void reset() {
    rank = 1;
    hangs_at = fails_at = 0;
    no_init = false;
    begun = aborted = destroyed = calls = made_ids = scaled = 0;
  }
};

// Null where the process has opened another library of that name, or none.
inline NcclStandIn* nccl_stand_in() {
  void* const library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
  return library ? static_cast<NcclStandIn*>(dlsym(library, "chorale_nccl_stand_in")) : nullptr;
}

}  // namespace chorale::cuda
