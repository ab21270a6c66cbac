#include "chorale/base/parallel_for.h"

#include <omp.h>

#include <algorithm>
#include <exception>

#include "chorale/base/error.h"

namespace chorale {

int thread_count() { return omp_get_max_threads(); }
void set_thread_count(int count) {
  CHORALE_CHECK(count >= 1, "[set_thread_count] needs at least one thread, not ", count);
  omp_set_num_threads(count);
}

void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = std::min<int64_t>(count < 2 * grain ? 1 : count / grain, thread_count());
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
