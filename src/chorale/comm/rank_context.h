// Inside comm: what the groups of one rank share.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/base/forks.h"
#include "chorale/comm/algorithm/table.h"
#include "chorale/device/allocator.h"
#include "chorale/transport/fabric/chaos.h"

namespace chorale::comm {

class Engine;
class NetHub;

// A wait in one group moves the others too: ranks may wait for the works of two
// groups in different orders.
class RankContext {
 public:
  std::mutex mutex;  // guards every engine of this rank
  std::vector<Engine*> engines;
  // False when ranks outnumber cores: a waiting rank then gives its core away at once.
  bool core_each = true;
  // Payloads carry checksums, which every receiver verifies.
  bool checksum = false;
  // Faults on purpose; null: none.
  std::shared_ptr<transport::Chaos> chaos;
  // Groups are named by a count of all that were made, also of those this rank is not in.
  int64_t groups_made = 0;

  // Which way calls go (algorithm/table.h).
  AlgorithmTable algorithms = AlgorithmTable::from_environment();

  // What connects this rank with those on other hosts; null when there are none.
  std::shared_ptr<NetHub> net;

  // Threads, connections and shared memory are of the process that made them.
  const base::ForkMark made;

  // Memory that peers can map, for data that lies elsewhere.
  CachingAllocator& scratch();
  // One with a lock of its own and the same scratch memory, for the engine of one host inside that of several.
  std::shared_ptr<RankContext> inner();

 private:
  std::shared_ptr<CachingAllocator> scratch_;
};

}  // namespace chorale::comm
