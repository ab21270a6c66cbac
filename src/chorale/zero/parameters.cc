#include "chorale/zero/parameters.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/update.h"
#include "chorale/zero/partition.h"

namespace chorale::zero {

OwnedParameters::OwnedParameters(comm::Group group, bool bucket_views)
    : group_(std::move(group)), bucket_views_(bucket_views) {
  CHORALE_CHECK(group_.is_member(), "[ZeroOptimizer] this rank is not in the group");
  totals_.resize(static_cast<size_t>(group_.size()));
}

NamedTensors OwnedParameters::add(const NamedTensors& parameters) {
  CHORALE_CHECK(!parameters.empty(), "[ZeroOptimizer] a group has no parameters");
  std::vector<int64_t> elems;
  for (const auto& [name, x] : parameters)
    CHORALE_CHECK(x.defined(), "[ZeroOptimizer] parameter ", name, " is an undefined tensor");
  const DType dtype = all_.empty() ? parameters.front().second.dtype() : all_.front().second.dtype();
  for (const auto& [name, x] : parameters) {
    CHORALE_CHECK(!x.is_sparse() && x.is_contiguous(), "[ZeroOptimizer] parameter ", name,
                  " must be a dense, contiguous tensor");
    CHORALE_CHECK(x.dtype() == dtype, "[ZeroOptimizer] parameter ", name, " is ", x.dtype(), ", and the first one is ",
                  dtype, "; all must have one dtype");
    elems.push_back(x.elems());
  }
  const std::vector<int> owners = owners_of(elems, totals_);
  NamedTensors own;
  for (size_t i = 0; i < parameters.size(); ++i) {
    all_.push_back(parameters[i]);
    owners_.push_back(owners[i]);
    if (owners[i] == group_.rank()) own.push_back(parameters[i]);
  }
  if (bucket_views_) make_buckets();
  return own;
}

void OwnedParameters::set_owners(const std::vector<int>& owners) {
  CHORALE_INVARIANT(owners.size() == all_.size(), "an owner for each parameter");
  owners_ = owners;
  std::fill(totals_.begin(), totals_.end(), 0);
  for (size_t i = 0; i < all_.size(); ++i) totals_[static_cast<size_t>(owners_[i])] += all_[i].second.elems();
  if (bucket_views_) make_buckets();
}

void OwnedParameters::make_buckets() {
  const NoGrad quiet;
  std::vector<Device> devices;  // by bucket
  std::vector<size_t> bucket_of(all_.size());
  buckets_.clear();
  for (size_t i = 0; i < all_.size(); ++i) {
    const Tensor& x = all_[i].second;
    size_t b = 0;
    while (b < buckets_.size() && !(buckets_[b].owner == owners_[i] && devices[b] == x.device())) ++b;
    if (b == buckets_.size()) {
      buckets_.push_back({owners_[i], 0, {}});
      devices.push_back(x.device());
    }
    buckets_[b].elems += x.elems();
    bucket_of[i] = b;
  }
  std::vector<int64_t> filled(buckets_.size());
  for (size_t b = 0; b < buckets_.size(); ++b)
    buckets_[b].memory = Tensor::empty({buckets_[b].elems}, all_.front().second.dtype(), devices[b]);
  for (size_t i = 0; i < all_.size(); ++i) {
    const Tensor& x = all_[i].second;
    const Tensor view = buckets_[bucket_of[i]].memory.view_as(x.sizes(), x.strides(), filled[bucket_of[i]]);
    copy_(view, x);
    set_data(x, view);
    filled[bucket_of[i]] += x.elems();
  }
}

void OwnedParameters::broadcast() {
  std::vector<comm::Work> works;
  if (bucket_views_) {
    for (const Bucket& bucket : buckets_)
      works.push_back(group_.broadcast(bucket.memory, group_.global_rank(bucket.owner)));
  } else {
    std::vector<size_t> places(all_.size());
    std::iota(places.begin(), places.end(), size_t{0});
    works = start_broadcast(places);
  }
  for (const comm::Work& work : works) work.wait();
}

std::vector<comm::Work> OwnedParameters::start_broadcast(const std::vector<size_t>& places) const {
  std::vector<comm::Work> works;
  works.reserve(places.size());
  for (const size_t i : places) works.push_back(group_.broadcast(all_[i].second, group_.global_rank(owners_[i])));
  return works;
}

double OwnedParameters::clip_grad_norm(double max_norm) const {
  CHORALE_CHECK(max_norm > 0, "[ZeroOptimizer] max_norm must be positive, not ", max_norm);
  const NoGrad quiet;
  std::vector<std::pair<Device, std::vector<Tensor>>> own;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (owners_[i] != group_.rank()) continue;
    const Tensor dx = gradient(all_[i].second);
    if (!dx.defined()) continue;
    const auto found =
        std::find_if(own.begin(), own.end(), [&](const auto& entry) { return entry.first == dx.device(); });
    (found != own.end() ? *found : own.emplace_back(dx.device(), std::vector<Tensor>())).second.push_back(dx);
  }
  double squares = 0;
  for (const auto& [device, gradients] : own) {
    const double norm = norm_of_all(gradients, 2).item<double>();
    squares += norm * norm;
  }
  group_.all_reduce(std::span(&squares, 1)).wait();
  const double total = std::sqrt(squares);
  if (max_norm / (total + 1e-6) >= 1) return total;
  for (const auto& [device, gradients] : own)
    clip_by_norm_(gradients, to(Tensor::from<double>({total}, {}), device), max_norm);
  return total;
}

}  // namespace chorale::zero
