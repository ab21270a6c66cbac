// Batch norm over the batches of all ranks of a group, for libtorch modules: with it, N ranks that see a part of a
// batch each compute what one rank computes on the whole. Only training communicates.
#pragma once

#include <torch/torch.h>

#include "chorale/comm/group.h"

namespace chorale_torch {

// Stands in for torch::nn::BatchNorm1d, 2d and 3d, with the same parameters, buffers and names. Every rank of the group
// must use it at the same time, in the same order; batches may have different sizes.
class SyncBatchNormImpl final : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, std::shared_ptr<const chorale::comm::Group> group)
      : NormImplBase(options), group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 private:
  void _check_input_dim(const at::Tensor& input) override;

  std::shared_ptr<const chorale::comm::Group> group_;
};
TORCH_MODULE(SyncBatchNorm);

// Replaces every batch norm in a torch::nn::Sequential, the module itself or in it. Collective: the layers
// share a duplicate of the group. A batch norm that is a member of a class of yours cannot be replaced, since its
// forward is not virtual: it is a StateError that names it; declare that member as a SyncBatchNorm.
void convert_sync_batchnorm(torch::nn::Module& module, const chorale::comm::Group& group);

}  // namespace chorale_torch
