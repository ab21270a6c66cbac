// Data sets. There is nothing to derive from: a data set is any type with
//
//   int64_t size() const;
//   Example get(int64_t index) const;                   // or
//   Example get(int64_t index, Generator& rng) const;   // for random augmentation: numbers of this sample and epoch
//   alone
//
// where Example is whatever `collate` knows. get is called by several threads at once. Where a whole batch is cheaper
// than its examples one by one, as it is for data in memory, the type also has
//
//   Batch get_batch(std::span<const int64_t> indices) const;
//
// which the loader then prefers.
#pragma once

#include <concepts>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <type_traits>
#include <variant>

#include "chorale/base/generator.h"
#include "chorale/data/collate.h"
#include "chorale/data/sampler.h"

namespace chorale::data {

template <class D>
concept RandomizedDataset = requires(const D& d, int64_t index, Generator& rng) {
  { d.size() } -> std::convertible_to<int64_t>;
  d.get(index, rng);
};
template <class D>
concept PlainDataset = requires(const D& d, int64_t index) {
  { d.size() } -> std::convertible_to<int64_t>;
  d.get(index);
};
template <class D>
concept Dataset = PlainDataset<D> || RandomizedDataset<D>;
template <class D>
concept BatchDataset = Dataset<D> && requires(const D& d, std::span<const int64_t> indices) {
  d.get_batch(indices);
};

template <Dataset D>
auto get_example(const D& dataset, int64_t index, Generator& rng) {
  if constexpr (RandomizedDataset<D>) {
    return dataset.get(index, rng);
  } else {
    return dataset.get(index);
  }
}
template <class D>
using ExampleOf = decltype(get_example(std::declval<const D&>(), 0, std::declval<Generator&>()));

// Tensors in memory whose first dimension counts the samples; y may be undefined. A batch is one copy of rows.
class TensorDataset {
 public:
  explicit TensorDataset(const Tensor& x, const Tensor& y = {});
  int64_t size() const { return x_.size(0); }
  Example get(int64_t index) const;
  Example get_batch(std::span<const int64_t> indices) const;

 private:
  Tensor x_, y_;
};

// Rows of x, whose first dimension `indices` point into; InvalidArgument for one that is out of range.
Tensor rows_at(const Tensor& x, std::span<const int64_t> indices);

// A data set seen through a function of an example, or of an example and the sample's generator.
template <Dataset D, class F>
class Mapped {
 public:
  Mapped(D dataset, F function) : dataset_(std::move(dataset)), function_(std::move(function)) {}
  int64_t size() const { return dataset_.size(); }
  auto get(int64_t index, Generator& rng) const {
    if constexpr (std::invocable<const F&, ExampleOf<D>, Generator&>) {
      return function_(get_example(dataset_, index, rng), rng);
    } else {
      return function_(get_example(dataset_, index, rng));
    }
  }

 private:
  D dataset_;
  F function_;
};

// Some samples of a data set, in the order given.
template <Dataset D>
class Subset {
 public:
  Subset(std::shared_ptr<const D> dataset, std::vector<int64_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    for (const int64_t index : indices_) {
      CHORALE_CHECK(index >= 0 && index < dataset_->size(), "[Subset] there is no sample ", index, " among ",
                    dataset_->size());
    }
  }
  int64_t size() const { return static_cast<int64_t>(indices_.size()); }
  auto get(int64_t index, Generator& rng) const { return get_example(*dataset_, at(index), rng); }
  auto get_batch(std::span<const int64_t> indices) const requires BatchDataset<D> {
    std::vector<int64_t> inner;
    inner.reserve(indices.size());
    for (const int64_t index : indices) inner.push_back(at(index));
    return dataset_->get_batch(inner);
  }

 private:
  int64_t at(int64_t index) const {
    CHORALE_CHECK(index >= 0 && index < size(), "[Subset] there is no sample ", index, " among ", size());
    return indices_[static_cast<size_t>(index)];
  }

  std::shared_ptr<const D> dataset_;
  std::vector<int64_t> indices_;
};

// Parts of the given sizes, which add up to the data set's, drawn at random.
template <Dataset D>
std::vector<Subset<D>> random_split(std::shared_ptr<const D> dataset, const std::vector<int64_t>& sizes,
                                    uint64_t seed) {
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  CHORALE_CHECK(sum == dataset->size(), "[random_split] the parts have ", sum, " samples, the data set ",
                dataset->size());
  const std::vector<int64_t> order = RandomSampler(sum, seed).indices(0);
  std::vector<Subset<D>> parts;
  auto at = order.begin();
  for (const int64_t size : sizes) {
    CHORALE_CHECK(size >= 0, "[random_split] a part cannot have ", size, " samples");
    parts.emplace_back(dataset, std::vector<int64_t>(at, at + size));
    at += size;
  }
  return parts;
}

}  // namespace chorale::data
