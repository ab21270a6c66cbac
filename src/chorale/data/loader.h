// Batches of a data set, epoch after epoch.
//
//   data::DataLoader loader(dataset, {.batch_size = 32, .shuffle = true, .workers = 2, .seed = 1});
//   for (int epoch = 0; epoch < 5; ++epoch)
//     for (const auto& [x, y] : loader) step(x, y);
//
// What a loader yields is a function of the data set, the sampler, the seed and the epoch: the number of workers
// changes the speed only. It goes on where it stands: a loop that is left in the middle of an epoch is continued by the
// next one, and so is one whose state was saved and loaded in another process. set_epoch starts an epoch from its
// beginning.
#pragma once

#include <optional>

#include "chorale/data/dataset.h"
#include "chorale/data/pipeline.h"

namespace chorale::data {

struct LoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;    // a RandomSampler of the seed; with a sampler of your own, that one decides
  bool drop_last = false;  // leave out a last batch that is smaller
  int workers = 0;         // threads that make batches ahead; 0: the calling thread makes each one when it is asked for
  int prefetch = 2;        // batches per worker that may be in the making or wait to be taken
  uint64_t seed = 0;       // of the order, and of the samples' generators
};

// Where a loader stands: enough to go on in another process.
struct LoaderState {
  uint64_t seed = 0;
  int64_t epoch = 0;
  int64_t batch = 0;    // handed out in this epoch
  int64_t batches = 0;  // in an epoch; loading checks that it is still the same (-1: not known, a stream)

  friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

// A sample that could not be loaded. The data set's own exception is nested in it (std::rethrow_if_nested), its text is
// part of what().
class SampleError : public StateError {
 public:
  SampleError(int64_t sample, const std::string& message) : StateError(message), index(sample) {}
  int64_t index;
};
// Called in a catch block: throws SampleError around the exception in flight.
[[noreturn]] void throw_sample_error(int64_t index);

void check_loader_state(const LoaderState& loaded, const LoaderState& own);

// What loaders of data sets and of streams have in common: position, loops, workers.
template <class BatchType>
class LoaderBase {
 public:
  using Batch = BatchType;

  // The next batch of this epoch; nothing at its end, and after that the next epoch's. Throws what a worker threw, in
  // the place of its batch; a further call goes on behind it.
  std::optional<Batch> next() {
    if (!pipeline_) {
      CHORALE_CHECK(start_, "[DataLoader] the loader was moved from");
      pipeline_ = std::make_unique<Pipeline>(start_(state_.epoch, state_.batch), workers_, workers_ * prefetch_);
    }
    Pipeline::Result result;
    try {
      result = pipeline_->next();
    } catch (...) {
      pipeline_.reset();
      ++state_.batch;
      throw;
    }
    if (!result) {
      set_epoch(state_.epoch + 1);
      return {};
    }
    ++state_.batch;
    return std::move(*static_cast<Batch*>(result.get()));
  }

  // A loop over the rest of this epoch.
  class Iterator {
   public:
    explicit Iterator(LoaderBase& loader) : loader_(&loader), batch_(loader.next()) {}
    Batch& operator*() { return *batch_; }
    Iterator& operator++() {
      batch_.reset();  // first, so that the caller never holds two
      batch_ = loader_->next();
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return !batch_; }

   private:
    LoaderBase* loader_;
    std::optional<Batch> batch_;
  };
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

  LoaderState state() const { return state_; }
  // Throws InvalidArgument when the state is of a loader with another seed or another number of batches.
  void load_state(const LoaderState& state) {
    check_loader_state(state, state_);
    pipeline_.reset();
    state_ = state;
  }
  // Goes to the first batch of an epoch. Workers of the one before are stopped.
  void set_epoch(int64_t epoch) {
    pipeline_.reset();
    state_.epoch = epoch;
    state_.batch = 0;
  }

 protected:
  // What makes the batches of an epoch from `batch` on.
  using Start = std::function<Pipeline::Claim(int64_t epoch, int64_t batch)>;
  LoaderBase(Start start, const LoaderOptions& options, int64_t batches)
      : start_(std::move(start)), workers_(options.workers), prefetch_(options.prefetch) {
    CHORALE_CHECK(workers_ >= 0 && (workers_ == 0 || prefetch_ > 0),
                  "[DataLoader] expected workers of at least 0, with a prefetch of at least 1, found ", workers_,
                  " and ", prefetch_);
    state_.seed = options.seed;
    state_.batches = batches;
  }

 private:
  Start start_;
  int workers_, prefetch_;
  LoaderState state_;
  std::unique_ptr<Pipeline> pipeline_;
};

template <Dataset D>
auto make_batch(const D& dataset, const std::vector<int64_t>& indices, uint64_t seed, int64_t epoch) {
  if constexpr (BatchDataset<D>) {
    return dataset.get_batch(indices);
  } else {
    std::vector<ExampleOf<D>> examples;
    examples.reserve(indices.size());
    for (const int64_t index : indices) {
      Generator rng = sample_generator(seed, epoch, index);
      try {
        examples.push_back(get_example(dataset, index, rng));
      } catch (...) {
        throw_sample_error(index);
      }
    }
    return collate(examples);
  }
}
template <class D>
using BatchOf = decltype(make_batch(std::declval<const D&>(), {}, 0, 0));

// The batches that the options ask for.
std::shared_ptr<const BatchSampler> batches_of(int64_t dataset_size, const LoaderOptions& options);
std::shared_ptr<const BatchSampler> batches_of(std::shared_ptr<const Sampler> sampler, const LoaderOptions& options);
std::shared_ptr<const BatchSampler> batches_of(std::shared_ptr<const BatchSampler> batches,
                                               const LoaderOptions& options);

template <Dataset D>
class DataLoader : public LoaderBase<BatchOf<D>> {
 public:
  explicit DataLoader(D dataset, const LoaderOptions& options = {})
      : DataLoader(std::make_shared<const D>(std::move(dataset)), options) {}
  // Takes an order, or batches, of your own (then the options say nothing about them).
  DataLoader(D dataset, std::shared_ptr<const Sampler> sampler, const LoaderOptions& options = {})
      : DataLoader(std::make_shared<const D>(std::move(dataset)), batches_of(std::move(sampler), options), options) {}
  DataLoader(D dataset, std::shared_ptr<const BatchSampler> batches, const LoaderOptions& options = {})
      : DataLoader(std::make_shared<const D>(std::move(dataset)), batches_of(std::move(batches), options), options) {}

  // Batches in an epoch.
  int64_t size() const { return this->state().batches; }
  const D& dataset() const {
    CHORALE_CHECK(dataset_, "[DataLoader] the loader was moved from");
    return *dataset_;
  }

 private:
  DataLoader(std::shared_ptr<const D> dataset, const LoaderOptions& options)
      : DataLoader(dataset, batches_of(dataset->size(), options), options) {}
  DataLoader(const std::shared_ptr<const D>& dataset, const std::shared_ptr<const BatchSampler>& batches,
             const LoaderOptions& options)
      : LoaderBase<BatchOf<D>>(
            [dataset, batches, seed = options.seed](int64_t epoch, int64_t first) {
              return claims(dataset, std::make_shared<const Batches>(batches->batches(epoch)), seed, epoch, first);
            },
            options, batches->size()),
        dataset_(dataset) {}

  static Pipeline::Claim claims(const std::shared_ptr<const D>& dataset, const std::shared_ptr<const Batches>& batches,
                                uint64_t seed, int64_t epoch, int64_t first) {
    return [=, at = static_cast<size_t>(first)]() mutable -> Pipeline::Job {
      if (at >= batches->size()) return {};
      return [=, batch = at++] {
        return std::make_shared<BatchOf<D>>(make_batch(*dataset, (*batches)[batch], seed, epoch));
      };
    };
  }

  std::shared_ptr<const D> dataset_;
};

}  // namespace chorale::data
