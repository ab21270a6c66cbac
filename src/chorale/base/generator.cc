#include "chorale/base/generator.h"

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/generator_scope.h"

namespace chorale {

RandomStream Generator::take(int64_t words) {
  CHORALE_CHECK(words >= 0, "[Generator] cannot take ", words, " random words");
  const std::lock_guard lock(mutex_);
  const RandomStream begin = state_;
  state_.offset += (static_cast<uint64_t>(words) + 3) / 4;
  return begin;
}

RandomStream Generator::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void Generator::restore(RandomStream state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
}

uint64_t Generator::fork_seed(uint64_t index) const {
  constexpr uint64_t kFork = 0x666F726B;  // "fork": no stream has this upper half of the counter
  const auto words = base::philox(state().seed, index, kFork);
  return uint64_t{words[1]} << 32 | words[0];
}

namespace {
// Ranks of a job draw different numbers unless they are told a seed: equal dropout masks and equal samples on all of
// them would go unnoticed.
uint64_t first_seed() {
  const int rank = config::launched_rank();
  return rank > 0 ? Generator().fork(static_cast<uint64_t>(rank)).state().seed : 0;
}
}  // namespace

Generator& default_generator() {
  if (Generator* scoped = GeneratorScope::current()) return *scoped;
  static Generator generator(first_seed());
  return generator;
}

void manual_seed(uint64_t seed) { default_generator().reseed(seed); }

}  // namespace chorale
