// Inside zero: the parameters of all ranks, and how new values get from their owners to all others.
#pragma once

#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::zero {

class OwnedParameters {
 public:
  // `bucket_views`: parameters of one owner on one device become views of one buffer, which is sent at once; otherwise
  // each is sent alone.
  OwnedParameters(comm::Group group, bool bucket_views);
  bool has_bucket_views() const { return bucket_views_; }

  // Adds parameters, with an owner each, and returns those that this rank owns. All must be dense, contiguous and of
  // one dtype: InvalidArgument names the one that is not.
  NamedTensors add(const NamedTensors& parameters);
  // Other owners, by parameter.
  void set_owners(const std::vector<int>& owners);
  // Everyone gets the owners' values.
  void broadcast();
  // The same of some parameters (places among all), begun and not waited for. All ranks name the same ones.
  std::vector<comm::Work> start_broadcast(const std::vector<size_t>& places) const;
  // Clips the gradients that their owners have by the norm of all ranks' together, and returns that.
  double clip_grad_norm(double max_norm) const;

  const comm::Group& group() const { return group_; }
  const NamedTensors& all() const { return all_; }
  const std::vector<int>& owners() const { return owners_; }  // group ranks
  const std::vector<int64_t>& totals() const { return totals_; }

 private:
  void make_buckets();

  comm::Group group_;
  bool bucket_views_;
  NamedTensors all_;
  std::vector<int> owners_;
  std::vector<int64_t> totals_;
  struct Bucket {  // of an owner's parameters on one device
    int owner;
    int64_t elems;
    Tensor memory;
  };
  std::vector<Bucket> buckets_;
};

}  // namespace chorale::zero
