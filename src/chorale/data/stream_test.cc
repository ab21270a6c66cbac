#include "chorale/data/stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace chorale::data {
namespace {

// Counts from 100 * epoch; fails at example `bad`.
struct Counting {
  int64_t count = 7, bad = -1, at = 0, begin = 0;
  void rewind(int64_t epoch) {
    at = 0;
    begin = 100 * epoch;
  }
  std::optional<int64_t> next() {
    if (at == bad) throw std::runtime_error("torn line");
    if (at == count) return {};
    return begin + at++;
  }
};

template <class Loader>
std::vector<std::vector<int64_t>> rest_of_epoch(Loader& loader) {
  std::vector<std::vector<int64_t>> result;
  for (const Tensor& batch : loader) result.push_back(batch.template to_vector<int64_t>());
  return result;
}

TEST(StreamLoader, KeepsTheOrderWhateverTheNumberOfWorkers) {
  const auto slow = [](int64_t value) {
    std::this_thread::sleep_for(std::chrono::microseconds(value * 7919 % 1000));
    return value;
  };
  for (const int workers : {0, 1, 3}) {
    StreamLoader loader(Counting{}, {.batch_size = 2, .workers = workers}, slow);
    EXPECT_EQ(rest_of_epoch(loader), (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}, {4, 5}, {6}}));
    EXPECT_EQ(rest_of_epoch(loader), (std::vector<std::vector<int64_t>>{{100, 101}, {102, 103}, {104, 105}, {106}}));
  }
  StreamLoader dropping(Counting{}, {.batch_size = 2, .drop_last = true});
  EXPECT_EQ(rest_of_epoch(dropping).size(), 3u);
}

TEST(StreamLoader, ResumesFromItsState) {
  const auto noisy = [](int64_t value, Generator& rng) {
    return std::pair<int64_t, int64_t>(value, rng.take(1).seed >> 1);
  };
  StreamLoader loader(Counting{}, {.batch_size = 2, .workers = 2, .seed = 3}, noisy);
  loader.set_epoch(2);
  loader.next();
  StreamLoader resumed(Counting{}, {.batch_size = 2, .seed = 3}, noisy);
  resumed.load_state(loader.state());
  for (int i = 0; i < 3; ++i) {
    const auto a = loader.next(), b = resumed.next();
    EXPECT_EQ(a->first.to_vector<int64_t>()[0], 200 + 2 * (i + 1));
    EXPECT_EQ(a->first.to_vector<int64_t>(), b->first.to_vector<int64_t>());
    EXPECT_EQ(a->second.to_vector<int64_t>(), b->second.to_vector<int64_t>());
  }
}

TEST(StreamLoader, RethrowsWithTheExamplesNumber) {
  for (const int workers : {0, 2}) {
    StreamLoader loader(Counting{.bad = 5}, {.batch_size = 2, .workers = workers});
    loader.next();
    loader.next();
    try {
      loader.next();
      FAIL();
    } catch (const SampleError& error) {
      EXPECT_EQ(error.index, 5);
    }
  }
}

TEST(StreamLoader, RefusesToShuffle) { EXPECT_THROW(StreamLoader(Counting{}, {.shuffle = true}), InvalidArgument); }

}  // namespace
}  // namespace chorale::data
