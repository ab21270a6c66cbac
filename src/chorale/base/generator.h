// Where random numbers come from: a generator hands out disjoint stretches of one Philox stream. It computes none
// itself; ops do, from the stretch they were given, so that the same stretch gives the same numbers again (dropout's
// backward, activation checkpointing) whatever the number of threads.
#pragma once

#include <mutex>

#include "chorale/base/philox.h"

namespace chorale {

// Thread-safe; which thread gets which stretch depends on the order of their calls, so threads that must be
// reproducible use a generator each (see fork).
class Generator {
 public:
  explicit Generator(uint64_t seed = 0) : state_{seed, 0} {}
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Reserves `words` random words and says where they begin.
  RandomStream take(int64_t words);
  // Starts over with another seed.
  void reseed(uint64_t seed) { restore({seed, 0}); }
  // What to save, and to go on from later.
  RandomStream state() const;
  void restore(RandomStream state);

  // A generator of its own for rank, worker or replica `index`: a function of the seed and the index only, whatever was
  // taken before, and unrelated to this one and to those of other indices.
  Generator fork(uint64_t index) const { return Generator(fork_seed(index)); }

 private:
  uint64_t fork_seed(uint64_t index) const;

  mutable std::mutex mutex_;
  RandomStream state_;
};

// The stream of the process, used where a caller names no generator. It starts from seed 0.
Generator& default_generator();
// Starts the default stream over.
void manual_seed(uint64_t seed);

}  // namespace chorale
