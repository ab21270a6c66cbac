// The part of an epoch that one rank visits.
#pragma once

#include "chorale/comm/group.h"
#include "chorale/data/sampler.h"

namespace chorale::parallel {

struct DistributedSamplerOptions {
  bool shuffle = true;     // another order in each epoch, the same on all ranks
  uint64_t seed = 0;       // of the order: equal on all ranks
  bool drop_last = false;  // leave out the samples that do not go round, instead of repeating some
};

// Deals the samples of an epoch to the ranks in turn: rank r gets those at r, r + replicas, … of an order that all
// ranks share. All get equally many: by default the order goes on from its start until it is divisible, as often as it
// takes. Like every sampler it holds no position; a loader over it says where in which epoch it stands, and can be
// resumed there.
class DistributedSampler final : public data::Sampler {
 public:
  DistributedSampler(int64_t size, int rank, int replicas, const DistributedSamplerOptions& options = {});
  DistributedSampler(int64_t size, const comm::Group& group, const DistributedSamplerOptions& options = {})
      : DistributedSampler(size, group.rank(), group.size(), options) {}
  // Deals an order of your own, which must be the same on all ranks.
  DistributedSampler(std::shared_ptr<const data::Sampler> order, int rank, int replicas, bool drop_last = false);

  // How many samples one rank gets.
  int64_t size() const override;
  std::vector<int64_t> indices(int64_t epoch) const override;
  // How many samples all ranks get together, with those that are repeated.
  int64_t total_size() const { return size() * replicas_; }

 private:
  std::shared_ptr<const data::Sampler> order_;
  int rank_, replicas_;
  bool drop_last_;
};

}  // namespace chorale::parallel
