#include "chorale/data/loader.h"

namespace chorale::data {

void throw_sample_error(int64_t index) {
  std::string text = "an exception of unknown type";
  try {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the text above says it
  }
  std::throw_with_nested(SampleError(index, concat("[DataLoader] sample ", index, ": ", text)));
}

void check_loader_state(const LoaderState& loaded, const LoaderState& own) {
  CHORALE_CHECK(loaded.batches == own.batches, "[load_state] the state is of a loader with ", loaded.batches,
                " batches in an epoch; this one has ", own.batches);
  CHORALE_CHECK(loaded.seed == own.seed, "[load_state] the state is of a loader with seed ", loaded.seed,
                "; this one has ", own.seed);
  CHORALE_CHECK(loaded.epoch >= 0 && loaded.batch >= 0 && (own.batches < 0 || loaded.batch <= own.batches),
                "[load_state] there is no batch ", loaded.batch, " of epoch ", loaded.epoch);
}

std::shared_ptr<const BatchSampler> batches_of(int64_t dataset_size, const LoaderOptions& options) {
  std::shared_ptr<const Sampler> sampler;
  if (options.shuffle) {
    sampler = std::make_shared<RandomSampler>(dataset_size, options.seed);
  } else {
    sampler = std::make_shared<SequentialSampler>(dataset_size);
  }
  return std::make_shared<FixedBatches>(std::move(sampler), options.batch_size, options.drop_last);
}

std::shared_ptr<const BatchSampler> batches_of(std::shared_ptr<const Sampler> sampler, const LoaderOptions& options) {
  CHORALE_CHECK(!options.shuffle, "[DataLoader] the sampler decides on the order; leave out shuffle");
  return std::make_shared<FixedBatches>(std::move(sampler), options.batch_size, options.drop_last);
}

std::shared_ptr<const BatchSampler> batches_of(std::shared_ptr<const BatchSampler> batches,
                                               const LoaderOptions& options) {
  CHORALE_CHECK(batches, "[DataLoader] there is no batch sampler");
  CHORALE_CHECK(!options.shuffle && !options.drop_last && options.batch_size == 1,
                "[DataLoader] the batch sampler decides on the batches; leave out shuffle, drop_last and batch_size");
  return batches;
}

}  // namespace chorale::data
