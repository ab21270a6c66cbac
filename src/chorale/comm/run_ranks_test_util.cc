#include "chorale/comm/run_ranks_test_util.h"

#include <thread>

#include "chorale/transport/memory_store.h"

namespace chorale::comm {

void run_ranks(int size, const std::function<void(Group&)>& body, const GroupOptions& options) {
  transport::MemoryStore store;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Group group = Group::connect(store, "world", rank, size, options);
        body(group);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace chorale::comm
