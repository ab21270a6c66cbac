#include "chorale/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "chorale/base/parallel_for.h"
#include "chorale/op/random.h"

namespace chorale::data {
namespace {

using namespace std::chrono_literals;
using Numbers = std::vector<int64_t>;

// Sample i is the number i.
struct Count {
  int64_t n = 0;
  int64_t size() const { return n; }
  int64_t get(int64_t index) const { return index; }
};

// Sample i is i and a random number; samples take unequal time, so that workers finish out of order.
struct Noisy {
  int64_t size() const { return 50; }
  std::pair<int64_t, float> get(int64_t index, Generator& rng) const {
    std::this_thread::sleep_for(std::chrono::microseconds((index * 7919) % 300));
    return {index, uniform({}, 0, 1, DType::kF32, rng).item<float>()};
  }
};

// Counts how often it is asked, and fails at one sample.
struct Fragile {
  int64_t bad = -1;
  std::shared_ptr<std::atomic<int>> asked = std::make_shared<std::atomic<int>>(0);
  int64_t size() const { return 1000; }
  int64_t get(int64_t index) const {
    ++*asked;
    if (index == bad) throw std::out_of_range("torn picture");
    return index;
  }
};

template <class Loader>
std::vector<Numbers> rest_of_epoch(Loader& loader) {
  std::vector<Numbers> result;
  for (const Tensor& batch : loader) result.push_back(batch.template to_vector<int64_t>());
  return result;
}

TEST(DataLoader, CoversTheDataSetInOrder) {
  DataLoader loader(Count{5}, {.batch_size = 2});
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(rest_of_epoch(loader), (std::vector<Numbers>{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(rest_of_epoch(loader), (std::vector<Numbers>{{0, 1}, {2, 3}, {4}}));
  DataLoader dropping(Count{5}, {.batch_size = 2, .drop_last = true});
  EXPECT_EQ(rest_of_epoch(dropping), (std::vector<Numbers>{{0, 1}, {2, 3}}));
  DataLoader empty(Count{0}, {.batch_size = 2});
  EXPECT_TRUE(rest_of_epoch(empty).empty());
}

TEST(DataLoader, YieldsTheSameWhateverTheNumberOfWorkers) {
  const auto run = [](int workers, int prefetch) {
    DataLoader loader(Noisy{}, {.batch_size = 3, .shuffle = true, .workers = workers, .prefetch = prefetch, .seed = 4});
    std::vector<std::pair<Numbers, std::vector<float>>> result;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const auto& [index, noise] : loader) {
        result.emplace_back(index.to_vector<int64_t>(), noise.to_vector<float>());
      }
    }
    return result;
  };
  const auto expected = run(0, 2);
  ASSERT_EQ(expected.size(), 34u);
  EXPECT_NE(expected[0], expected[17]);
  for (const int workers : {1, 2, 5}) EXPECT_EQ(run(workers, 2), expected) << workers;
  EXPECT_EQ(run(3, 1), expected);
}

TEST(DataLoader, GivesASampleOtherNumbersInEachEpoch) {
  DataLoader loader(Noisy{}, {.batch_size = 50});
  const auto first = (*loader.next()).second.to_vector<float>();
  loader.set_epoch(1);
  EXPECT_NE((*loader.next()).second.to_vector<float>(), first);
  loader.set_epoch(0);
  EXPECT_EQ((*loader.next()).second.to_vector<float>(), first);
}

TEST(DataLoader, ContinuesALoopThatWasLeft) {
  for (const int workers : {0, 2}) {
    DataLoader loader(Count{10}, {.batch_size = 2, .workers = workers});
    for (const Tensor& batch : loader) {
      if (batch.to_vector<int64_t>()[0] == 2) break;
    }
    EXPECT_EQ(rest_of_epoch(loader), (std::vector<Numbers>{{4, 5}, {6, 7}, {8, 9}}));
    EXPECT_EQ(loader.state().epoch, 1);
  }
}

TEST(DataLoader, ResumesInTheMiddleOfAnEpochFromItsState) {
  const LoaderOptions options{.batch_size = 3, .shuffle = true, .workers = 2, .seed = 9};
  DataLoader loader(Noisy{}, options);
  loader.set_epoch(3);
  for (int i = 0; i < 4; ++i) loader.next();
  const LoaderState state = loader.state();
  EXPECT_EQ(state, (LoaderState{.seed = 9, .epoch = 3, .batch = 4, .batches = 17}));

  LoaderOptions other = options;
  other.workers = 0;
  DataLoader resumed(Noisy{}, other);
  resumed.load_state(state);
  for (int i = 4; i < 17 + 2; ++i) {  // into the next epoch
    const auto a = loader.next(), b = resumed.next();
    ASSERT_EQ(a.has_value(), b.has_value());
    if (!a) continue;
    EXPECT_EQ(a->first.to_vector<int64_t>(), b->first.to_vector<int64_t>());
    EXPECT_EQ(a->second.to_vector<float>(), b->second.to_vector<float>());
  }
  EXPECT_EQ(loader.state(), resumed.state());
}

TEST(DataLoader, RefusesTheStateOfAnotherLoader) {
  DataLoader loader(Count{10}, {.batch_size = 2, .seed = 1});
  EXPECT_THROW(loader.load_state({.seed = 1, .epoch = 0, .batch = 0, .batches = 6}), InvalidArgument);
  EXPECT_THROW(loader.load_state({.seed = 2, .epoch = 0, .batch = 0, .batches = 5}), InvalidArgument);
  EXPECT_THROW(loader.load_state({.seed = 1, .epoch = 0, .batch = 6, .batches = 5}), InvalidArgument);
  EXPECT_THROW(loader.load_state({.seed = 1, .epoch = -1, .batch = 0, .batches = 5}), InvalidArgument);
}

TEST(DataLoader, RefusesWorkersThatCannotBeWhenItIsMade) {
  EXPECT_THROW(DataLoader(Count{10}, {.batch_size = 2, .workers = -1}), InvalidArgument);
  EXPECT_THROW(DataLoader(Count{10}, {.batch_size = 2, .workers = 1, .prefetch = 0}), InvalidArgument);
}

TEST(DataLoader, RethrowsWithTheSamplesIndexInTheBatchesPlaceAndGoesOn) {
  for (const int workers : {0, 1, 4}) {
    SCOPED_TRACE(workers);
    DataLoader loader(Fragile{.bad = 25}, {.batch_size = 10, .workers = workers});
    EXPECT_EQ(loader.next()->to_vector<int64_t>()[0], 0);
    EXPECT_EQ(loader.next()->to_vector<int64_t>()[0], 10);
    try {
      loader.next();
      FAIL();
    } catch (const SampleError& error) {
      EXPECT_EQ(error.index, 25);
      EXPECT_STREQ(error.what(), "[DataLoader] sample 25: torn picture");
      EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
    }
    EXPECT_EQ(loader.next()->to_vector<int64_t>()[0], 30);
  }
}

TEST(DataLoader, MakesAtMostPrefetchBatchesPerWorkerAhead) {
  const Fragile dataset;
  DataLoader loader(dataset, {.batch_size = 1, .workers = 3, .prefetch = 2});
  loader.next();
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (*dataset.asked <= 1 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_GT(*dataset.asked, 1);
  std::this_thread::sleep_for(50ms);  // time for more than there may be
  EXPECT_LE(*dataset.asked, 1 + 3 * 2);
}

TEST(DataLoader, StopsCleanlyInTheMiddleOfAnEpoch) {
  const Fragile dataset;
  for (int taken = 0; taken < 20; ++taken) {
    DataLoader loader(dataset, {.batch_size = 2, .workers = 4});
    for (int i = 0; i < taken; ++i) loader.next();
  }
  const int asked = *dataset.asked;
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(*dataset.asked, asked);
}

TEST(DataLoader, ThatWasMovedFromIsAnError) {
  DataLoader loader(Count{10}, {.batch_size = 2});
  const DataLoader taken = std::move(loader);
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_THROW(loader.next(), InvalidArgument);
  EXPECT_THROW(loader.dataset(), InvalidArgument);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(taken.size(), 5);
}

TEST(DataLoader, CanBeMovedWhileItWorks) {
  DataLoader loader(Count{6}, {.batch_size = 2, .workers = 2});
  loader.next();
  DataLoader moved = std::move(loader);
  EXPECT_EQ(rest_of_epoch(moved), (std::vector<Numbers>{{2, 3}, {4, 5}}));
}

TEST(DataLoader, TakesASamplerOrBatchesOfTheCallers) {
  DataLoader weighted(Count{3}, std::make_shared<WeightedSampler>(std::vector<double>{0, 1, 0}, 4, 0),
                      {.batch_size = 3});
  EXPECT_EQ(rest_of_epoch(weighted), (std::vector<Numbers>{{1, 1, 1}, {1}}));
  struct Odd final : BatchSampler {
    int64_t size() const override { return 2; }
    Batches batches(int64_t) const override { return {{2}, {0, 1}}; }
  };
  DataLoader odd(Count{3}, std::make_shared<Odd>());
  EXPECT_EQ(rest_of_epoch(odd), (std::vector<Numbers>{{2}, {0, 1}}));
  EXPECT_THROW(DataLoader(Count{3}, std::make_shared<Odd>(), {.batch_size = 2}), InvalidArgument);
  EXPECT_THROW(DataLoader(Count{3}, std::make_shared<SequentialSampler>(3), {.shuffle = true}), InvalidArgument);
}

TEST(DataLoader, WorkersUseOneThreadEachForOps) {
  struct Threads {
    int64_t size() const { return 1; }
    int64_t get(int64_t) const { return thread_count(); }
  };
  DataLoader loader(Threads{}, {.workers = 1});
  EXPECT_EQ(loader.next()->item<int64_t>(), 1);
}

}  // namespace
}  // namespace chorale::data
