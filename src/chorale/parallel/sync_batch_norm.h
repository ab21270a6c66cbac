// Batch norm over the batches of all ranks of a group: with it, N ranks that see a part of a batch each compute what
// one rank computes on the whole. Only training communicates, one all-gather in forward and one all-reduce in backward;
// ranks may have batches of different sizes, and empty ones.
#pragma once

#include "chorale/comm/group.h"
#include "chorale/nn/norm.h"

namespace chorale::parallel {

class SyncStatistics final : public nn::BatchStatistics {
 public:
  // Every rank of the group must use it at the same time, in the same order.
  explicit SyncStatistics(comm::Group group) : group_(std::make_shared<const comm::Group>(std::move(group))) {}

  // Gradients of weight and bias are those of this rank's part, like those of other layers. Second derivatives are a
  // StateError.
  Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight,
                    const Tensor& bias, double momentum, double eps) const override;
  std::string describe() const override;
  const comm::Group& group() const { return *group_; }

 private:
  std::shared_ptr<const comm::Group> group_;  // shared with gradients to be computed, which may outlive the layer
};

// From now on every batch norm in the module takes the statistics of its training batches over all ranks of the group.
// Collective: the layers share a duplicate of the group, so that their calls never mix with others'. In a group of one
// rank, and on a rank outside the group, they stay what they are to their own batch.
void convert_sync_batchnorm(nn::Module& module, const comm::Group& group);

// Layers that took their statistics over the ranks `before` (global; none: this rank alone, outside its group) take
// them over the ranks of `group` from now on; the others stay. Collective among the members of `group`.
void move_sync_batchnorm(nn::Module& module, const std::vector<int>& before, const comm::Group& group);
// The global ranks in a group; none on a rank outside.
std::vector<int> members_of(const comm::Group& group);

// True if the module has such a layer.
bool has_sync_batchnorm(nn::Module& module);

}  // namespace chorale::parallel
