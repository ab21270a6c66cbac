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
  buckets_.assign(totals_.size(), {});
  std::vector<int64_t> filled(totals_.size());
  for (size_t r = 0; r < buckets_.size(); ++r) {
    if (totals_[r] > 0) buckets_[r] = Tensor::empty({totals_[r]}, all_.front().second.dtype());
  }
  for (size_t i = 0; i < all_.size(); ++i) {
    const Tensor& x = all_[i].second;
    const auto r = static_cast<size_t>(owners_[i]);
    const Tensor view = buckets_[r].view_as(x.sizes(), x.strides(), filled[r]);
    copy_(view, x);
    set_data(x, view);
    filled[r] += x.elems();
  }
}

void OwnedParameters::broadcast() {
  std::vector<comm::Work> works;
  if (bucket_views_) {
    for (size_t r = 0; r < buckets_.size(); ++r) {
      if (buckets_[r].defined())
        works.push_back(group_.broadcast(buckets_[r], group_.global_rank(static_cast<int>(r))));
    }
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
  std::vector<Tensor> own;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (owners_[i] != group_.rank()) continue;
    if (const Tensor dx = gradient(all_[i].second); dx.defined()) own.push_back(dx);
  }
  const double norm = own.empty() ? 0 : norm_of_all(own, 2).item<double>();
  double squares = norm * norm;
  group_.all_reduce(std::span(&squares, 1)).wait();
  const double total = std::sqrt(squares);
  if (!own.empty() && max_norm / (total + 1e-6) < 1) clip_by_norm_(own, Tensor::from<double>({total}, {}), max_norm);
  return total;
}

}  // namespace chorale::zero
