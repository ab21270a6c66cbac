#include "chorale/base/parallel_for.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <latch>
#include <memory>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"

namespace chorale {
namespace {

// Note [Threads that wait]. At the end of a parallel region, and between two of them, a thread of libgomp spins for ten
// milliseconds and more before it sleeps. Beside another program that wants a core it spins its share of the core away
// and then waits for its turn, while the other threads wait for it: an op of 30 us takes milliseconds. libgomp reads
// how to wait from the environment when it is loaded, before any code of a library can run. But it spins for a moment
// only (some ten microseconds) while a process has more threads in teams than cores. So there is a team of threads that
// sleep for as long as the process lives, as small as suffices. A user who sets OMP_WAIT_POLICY or GOMP_SPINCOUNT has
// decided. libomp, the runtime of clang's programs, can be told.
void wait_briefly(int threads) {
  if (config::env("OMP_WAIT_POLICY") || config::env("GOMP_SPINCOUNT")) return;
  if (void* found = dlsym(RTLD_DEFAULT, "kmp_set_blocktime")) {
    reinterpret_cast<void (*)(int)>(found)(0);  // milliseconds
    return;
  }
  const int sleepers = std::max(1, omp_get_num_procs() - threads + 1);
  const auto ready = std::make_shared<std::latch>(1);
  std::thread([sleepers, ready] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the threads that handle them
#pragma omp parallel num_threads(sleepers + 1)
    { asm volatile(""); }
    ready->count_down();
    while (true) pause();
  }).detach();
  ready->wait();
}

// How many threads a thread of the program begins with: as many as the process may use at its start, by affinity and by
// the quota of its control group, which OpenMP does not know. Never by load: the bits of products depend on it.
thread_local bool settled = false;
void use_threads(int count) {
  settled = true;
  omp_set_num_threads(count);
  if (count > 1) {
    static const bool kBrief = (wait_briefly(count), true);
    static_cast<void>(kBrief);
  }
}

}  // namespace

int thread_count() {
  if (!settled) [[unlikely]] {
    static const int kCores = config::env("OMP_NUM_THREADS") ? omp_get_max_threads() : usable_cores();
    use_threads(std::min(kCores, omp_get_max_threads()));
  }
  return omp_get_max_threads();
}
void set_thread_count(int count) {
  CHORALE_CHECK(count >= 1, "[set_thread_count] needs at least one thread, not ", count);
  use_threads(count);
}

void parallel_for(int64_t count, int64_t grain, base::FunctionRef<void(int64_t begin, int64_t end)> body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = count < 2 * grain ? 1 : std::min<int64_t>(count / grain, thread_count());
  if (pieces <= 1 || omp_in_parallel()) {
    body(0, count);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(pieces))
  for (int64_t piece = 0; piece < pieces; ++piece) {
    try {
      body(count * piece / pieces, count * (piece + 1) / pieces);
    } catch (...) {
#pragma omp critical(chorale_parallel_for)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace chorale
