// Which samples an epoch visits, and in what order. Samplers hold no position: the order is a function of the epoch, so
// that any number of workers, and a run that resumes, see the same one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chorale/base/generator.h"

namespace chorale::data {

class Sampler {
 public:
  virtual ~Sampler() = default;
  // Indices in an epoch.
  virtual int64_t size() const = 0;
  // Thread-safe. Exactly size() of them.
  virtual std::vector<int64_t> indices(int64_t epoch) const = 0;
};

// 0 … size - 1.
class SequentialSampler final : public Sampler {
 public:
  explicit SequentialSampler(int64_t size);
  int64_t size() const override { return size_; }
  std::vector<int64_t> indices(int64_t epoch) const override;

 private:
  int64_t size_;
};

// Another permutation of 0 … size - 1 in each epoch.
class RandomSampler final : public Sampler {
 public:
  RandomSampler(int64_t size, uint64_t seed);
  int64_t size() const override { return size_; }
  std::vector<int64_t> indices(int64_t epoch) const override;

 private:
  int64_t size_;
  uint64_t seed_;
};

// `count` draws from 0 … weights.size() - 1, each in proportion to its weight; without replacement an index comes at
// most once.
class WeightedSampler final : public Sampler {
 public:
  WeightedSampler(std::vector<double> weights, int64_t count, uint64_t seed, bool replacement = true);
  int64_t size() const override { return count_; }
  std::vector<int64_t> indices(int64_t epoch) const override;

 private:
  std::vector<double> weights_;
  int64_t count_;
  uint64_t seed_;
  bool replacement_;
};

using Batches = std::vector<std::vector<int64_t>>;

// Which samples go together.
class BatchSampler {
 public:
  virtual ~BatchSampler() = default;
  // Batches in an epoch.
  virtual int64_t size() const = 0;
  // Thread-safe. Exactly size() of them.
  virtual Batches batches(int64_t epoch) const = 0;
};

// A sampler's indices in groups of `batch_size`; the last one may be smaller, or is left out.
class FixedBatches final : public BatchSampler {
 public:
  FixedBatches(std::shared_ptr<const Sampler> sampler, int64_t batch_size, bool drop_last = false);
  int64_t size() const override;
  Batches batches(int64_t epoch) const override;

 private:
  std::shared_ptr<const Sampler> sampler_;
  int64_t batch_size_;
  bool drop_last_;
};

// The generator of one sample in one epoch: its numbers depend on nothing else.
inline Generator sample_generator(uint64_t seed, int64_t epoch, int64_t index) {
  constexpr uint64_t kSamples = 1;
  return Generator(seed).fork(kSamples).fork(static_cast<uint64_t>(epoch)).fork(static_cast<uint64_t>(index));
}

}  // namespace chorale::data
