#include "chorale/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "chorale/base/error.h"

namespace chorale::data {
namespace {

// The numbers of a sampler in one epoch, unrelated to those of the samples.
class EpochNumbers {
 public:
  EpochNumbers(uint64_t seed, int64_t epoch)
      : stream_(Generator(seed).fork(kSampler).fork(static_cast<uint64_t>(epoch)).state()) {}

  uint64_t next() {
    if (left_ == 0) {
      words_ = base::philox(stream_.seed, stream_.offset++);
      left_ = 2;
    }
    --left_;
    return uint64_t{words_[2 * left_]} << 32 | words_[2 * left_ + 1];
  }
  // A number in [0, bound): the high half of a product of 128 bits, whose bias (bound / 2^64) nobody can see.
  int64_t below(int64_t bound) {
    __extension__ using uint128 = unsigned __int128;
    return static_cast<int64_t>((static_cast<uint128>(next()) * static_cast<uint64_t>(bound)) >> 64);
  }
  // A number in (0, 1).
  double uniform() { return (static_cast<double>(next() >> 12) + 0.5) * 0x1p-52; }

 private:
  static constexpr uint64_t kSampler = 0;

  RandomStream stream_;
  std::array<uint32_t, 4> words_{};
  size_t left_ = 0;
};

std::vector<int64_t> counting(int64_t size) {
  std::vector<int64_t> result(static_cast<size_t>(size));
  std::iota(result.begin(), result.end(), int64_t{0});
  return result;
}

}  // namespace

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  CHORALE_CHECK(size >= 0, "[SequentialSampler] there cannot be ", size, " samples");
}
std::vector<int64_t> SequentialSampler::indices(int64_t) const { return counting(size_); }

RandomSampler::RandomSampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  CHORALE_CHECK(size >= 0, "[RandomSampler] there cannot be ", size, " samples");
}
std::vector<int64_t> RandomSampler::indices(int64_t epoch) const {
  std::vector<int64_t> result = counting(size_);
  EpochNumbers numbers(seed_, epoch);
  for (int64_t left = size_; left > 1; --left) {
    std::swap(result[static_cast<size_t>(left - 1)], result[static_cast<size_t>(numbers.below(left))]);
  }
  return result;
}

WeightedSampler::WeightedSampler(std::vector<double> weights, int64_t count, uint64_t seed, bool replacement)
    : weights_(std::move(weights)), count_(count), seed_(seed), replacement_(replacement) {
  int64_t positive = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    CHORALE_CHECK(std::isfinite(weights_[i]) && weights_[i] >= 0, "[WeightedSampler] weight ", i, " is ", weights_[i],
                  "; weights are finite and not negative");
    if (weights_[i] > 0) ++positive;
  }
  CHORALE_CHECK(count >= 0, "[WeightedSampler] cannot draw ", count, " samples");
  CHORALE_CHECK(count == 0 || positive > 0, "[WeightedSampler] all weights are zero");
  CHORALE_CHECK(replacement || count <= positive, "[WeightedSampler] cannot draw ", count,
                " samples without replacement: only ", positive, " have a weight above zero");
}

std::vector<int64_t> WeightedSampler::indices(int64_t epoch) const {
  EpochNumbers numbers(seed_, epoch);
  const auto count = static_cast<size_t>(count_);
  std::vector<int64_t> result(count);
  if (count == 0) return result;
  if (replacement_) {
    std::vector<double> sums(weights_.size());
    std::partial_sum(weights_.begin(), weights_.end(), sums.begin());
    for (int64_t& index : result) {
      // The first index whose sum exceeds the number has a weight above zero. Rounding can carry the number up to the
      // whole sum; then it is the first index to reach it.
      const double number = numbers.uniform() * sums.back();
      auto at = std::upper_bound(sums.begin(), sums.end(), number);
      if (at == sums.end()) at = std::lower_bound(sums.begin(), sums.end(), sums.back());
      index = at - sums.begin();
    }
    return result;
  }
  // Each index waits an exponential time with its weight as rate; the first `count` to arrive are the draws, in order
  // (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
  std::vector<std::pair<double, int64_t>> arrivals;
  arrivals.reserve(weights_.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const double number = numbers.uniform();
    if (weights_[i] > 0) arrivals.emplace_back(-std::log(number) / weights_[i], static_cast<int64_t>(i));
  }
  std::partial_sort(arrivals.begin(), arrivals.begin() + count_, arrivals.end());
  for (size_t i = 0; i < count; ++i) result[i] = arrivals[i].second;
  return result;
}

FixedBatches::FixedBatches(std::shared_ptr<const Sampler> sampler, int64_t batch_size, bool drop_last)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last) {
  CHORALE_CHECK(sampler_, "[FixedBatches] there is no sampler");
  CHORALE_CHECK(batch_size > 0, "[FixedBatches] a batch needs at least one sample, not ", batch_size);
}

int64_t FixedBatches::size() const { return (sampler_->size() + (drop_last_ ? 0 : batch_size_ - 1)) / batch_size_; }

Batches FixedBatches::batches(int64_t epoch) const {
  const std::vector<int64_t> indices = sampler_->indices(epoch);
  Batches result(static_cast<size_t>(size()));
  auto at = indices.begin();
  for (auto& batch : result) {
    const auto end = at + std::min<int64_t>(batch_size_, indices.end() - at);
    batch.assign(at, end);
    at = end;
  }
  return result;
}

}  // namespace chorale::data
