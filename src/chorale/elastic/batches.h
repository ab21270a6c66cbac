// Which samples of a global batch a rank takes, whatever the number of ranks is at the time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/data/sampler.h"

namespace chorale::elastic {

// The global batch stays: rank r of n takes the samples ⌊rB/n⌋ to ⌊(r+1)B/n⌋ of the same B. They follow from the number
// of the step alone, so the place in the data is that number.
class Batches {
 public:
  // Each epoch of the data visits `order` once, in whole batches of B.
  Batches(std::shared_ptr<const data::Sampler> order, int64_t batch);

  int64_t steps_per_epoch() const;
  // The samples of a rank in a step. InvalidArgument where there are more ranks than samples in a batch.
  std::vector<int64_t> of(int64_t step, int rank, int ranks) const;
  std::vector<int64_t> of(int64_t step, const comm::Group& group) const { return of(step, group.rank(), group.size()); }
  // The factor by which the mean loss over the samples of a rank is multiplied, so that averages over ranks are means
  // over the global batch: n · own samples / B; 1 where all have the same.
  double weight(int rank, int ranks) const;
  double weight(const comm::Group& group) const { return weight(group.rank(), group.size()); }

 private:
  std::pair<int64_t, int64_t> part(int rank, int ranks) const;

  const std::shared_ptr<const data::Sampler> order_;
  const int64_t batch_;
  // The order of the epoch that was asked for last.
  mutable int64_t epoch_ = -1;
  mutable std::vector<int64_t> indices_;
};

// The same for a loader: this rank's part of each step of an epoch, in pieces that are equal but for one sample, and
// not larger than `largest`.
class Pieces final : public data::BatchSampler {
 public:
  struct Options {
    int64_t batch = 1, largest = 1;
    int rank = 0, ranks = 1;
    // The local batch stays: rank r takes the samples r·b to (r+1)·b behind the step's first one, b = batch /
    // first_ranks. With more ranks than first_ranks these reach into the next step's.
    bool local = false;
    int first_ranks = 1;
  };
  Pieces(std::shared_ptr<const data::Sampler> order, const Options& options);

  int64_t samples_of_step() const { return end_ - begin_; }
  int64_t pieces_of_step() const { return pieces_; }
  int64_t size() const override { return steps_ * pieces_; }
  data::Batches batches(int64_t epoch) const override;

 private:
  const std::shared_ptr<const data::Sampler> order_;
  const int64_t batch_, steps_;
  int64_t begin_ = 0, end_ = 0, pieces_ = 1;
};

}  // namespace chorale::elastic

namespace chorale::parallel {
using ElasticBatches = elastic::Batches;
}  // namespace chorale::parallel
