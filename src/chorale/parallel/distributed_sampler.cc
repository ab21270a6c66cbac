#include "chorale/parallel/distributed_sampler.h"

#include "chorale/base/error.h"

namespace chorale::parallel {
namespace {

std::shared_ptr<const data::Sampler> order_of(int64_t size, const DistributedSamplerOptions& options) {
  if (options.shuffle) return std::make_shared<data::RandomSampler>(size, options.seed);
  return std::make_shared<data::SequentialSampler>(size);
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t size, int rank, int replicas, const DistributedSamplerOptions& options)
    : DistributedSampler(order_of(size, options), rank, replicas, options.drop_last) {}

DistributedSampler::DistributedSampler(std::shared_ptr<const data::Sampler> order, int rank, int replicas,
                                       bool drop_last)
    : order_(std::move(order)), rank_(rank), replicas_(replicas), drop_last_(drop_last) {
  CHORALE_CHECK(rank >= 0 && rank < replicas, "[DistributedSampler] rank ", rank, " is not one of ", replicas,
                " replicas, which are numbered from 0");
}

int64_t DistributedSampler::size() const {
  const int64_t all = order_->size();
  return (drop_last_ ? all : all + replicas_ - 1) / replicas_;
}

std::vector<int64_t> DistributedSampler::indices(int64_t epoch) const {
  const std::vector<int64_t> all = order_->indices(epoch);
  std::vector<int64_t> own(static_cast<size_t>(size()));
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] = all[(static_cast<size_t>(rank_) + i * static_cast<size_t>(replicas_)) % all.size()];
  }
  return own;
}

}  // namespace chorale::parallel
