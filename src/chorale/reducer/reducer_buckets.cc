// How the reducer's buckets come to be, and how they are made anew (Note [Bucket order]).
#include <algorithm>
#include <limits>
#include <numeric>

#include "chorale/base/error.h"
#include "chorale/reducer/copy_values.h"
#include "chorale/reducer/reducer.h"

namespace chorale::reducer {

namespace {
constexpr size_t kFirstBucketBytes = 1 << 20, kBucketBytes = 25 << 20;
}  // namespace

// Before the order of gradients is known, small buckets would wait for each other in vain: one for all is enough,
// unless there will be no others.
std::vector<size_t> Reducer::limits(bool first) const {
  if (first && rebuilds()) return {std::numeric_limits<size_t>::max()};
  if (options_.bucket_cap_bytes) return {*options_.bucket_cap_bytes};
  return {kFirstBucketBytes, kBucketBytes};
}

std::vector<std::vector<size_t>> Reducer::assign(std::span<const size_t> order) const {
  std::vector<BucketItem> items;
  for (const GradientInfo& info : gradients_) {
    items.push_back(
        {static_cast<size_t>(count_elems(info.sizes)) * size_of(info.dtype), info.dtype, kCpu, info.sparse});
  }
  auto buckets = assign_buckets(items, limits(order.empty()), order).buckets;
  // The last parameters get their gradients first.
  if (order.empty()) std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

namespace {
// Buckets begin at cache lines.
int64_t padded(int64_t elems, DType dtype) {
  const auto line = static_cast<int64_t>(64 / size_of(dtype));
  return (elems + line - 1) / line * line;
}
}  // namespace

// Note [Arenas] All buckets of a dtype lie in one tensor. When they are made anew, and no gradient lies in the old ones
// (the usual zero_grad() before a forward drops them), they are only cut otherwise: gradients never exist twice.
Tensor Reducer::arena(DType dtype, int64_t elems, bool anew) {
  // Room for any way of cutting.
  const int64_t room = elems + static_cast<int64_t>(places_.size()) * padded(1, dtype);
  for (Tensor& known : arenas_) {
    if (known.dtype() != dtype) continue;
    if (anew) known = Tensor::empty({room}, dtype);
    return known;
  }
  return arenas_.emplace_back(Tensor::empty({room}, dtype));
}

void Reducer::make_buckets(const std::vector<std::vector<size_t>>& assignment) {
  // Old places of gradients that lie in a bucket.
  std::vector<Tensor> old(places_.size());
  bool any_old = false;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i].view.defined() || !places_[i].is_gradient) continue;
    const Tensor gradient = owner_.gradient(i);
    if (!gradient.defined() || gradient.raw() != places_[i].view.raw()) continue;
    old[i] = places_[i].view;
    any_old = true;
  }
  const auto dtype_of_bucket = [&](const std::vector<size_t>& parameters) {
    const DType dtype = gradients_[parameters[0]].dtype;
    return options_.reduce_dtype && is_floating(dtype) ? *options_.reduce_dtype : dtype;
  };
  const auto elems_of = [&](const std::vector<size_t>& parameters) {
    int64_t elems = 0;
    for (size_t i : parameters) elems += count_elems(gradients_[i].sizes);
    return elems;
  };
  struct Cut {
    Tensor arena;
    int64_t used = 0;
  };
  std::vector<Cut> cuts;  // by dtype
  buckets_.clear();
  for (const std::vector<size_t>& parameters : assignment) {
    if (gradients_[parameters[0]].sparse) {
      Place& place = places_[parameters[0]];
      place.bucket = buckets_.size();
      place.is_gradient = false;
      buckets_.push_back({.parameters = parameters, .buffer = {}, .views = {}});
      continue;
    }
    const DType dtype = dtype_of_bucket(parameters);
    auto cut = std::find_if(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.arena.dtype() == dtype; });
    if (cut == cuts.end()) {
      int64_t all = 0;
      for (const auto& other : assignment) {
        if (!gradients_[other[0]].sparse && dtype_of_bucket(other) == dtype) all += elems_of(other);
      }
      cut = cuts.insert(cut, {arena(dtype, all, any_old)});
    }
    const int64_t elems = elems_of(parameters);
    Bucket bucket{.parameters = parameters, .buffer = cut->arena.view_as({elems}, {1}, cut->used), .views = {}};
    int64_t offset = cut->used;
    cut->used += padded(elems, dtype);
    for (size_t i : parameters) {
      const GradientInfo& info = gradients_[i];
      // A gradient is laid out like its parameter if that is dense.
      const Strides strides = is_dense(info.sizes, info.strides) ? info.strides : contiguous_strides(info.sizes);
      Place& place = places_[i];
      place.bucket = buckets_.size();
      place.view = cut->arena.view_as(info.sizes, strides, offset);
      place.is_gradient = options_.gradient_as_bucket_view && dtype == info.dtype;
      offset += count_elems(info.sizes);
      bucket.views.push_back(place.view);
      if (!place.is_gradient) continue;
      if (old[i].defined()) {
        copy_values(old[i], place.view);
        owner_.set_gradient(i, place.view);
      }
      owner_.set_destination(i, place.view);
    }
    buckets_.push_back(std::move(bucket));
  }
  start_over();
}

bool Reducer::rebuild_if_due() {
  // The first backward of a static graph reduces everything at its end, and shows no order.
  if (rebuilt_ || !rebuilds() || running_ || reductions_ < (options_.static_graph ? 2 : 1)) return false;
  rebuilt_ = true;
  std::vector<size_t> order = ready_order_;
  std::vector<bool> seen(places_.size());
  for (size_t i : order) seen[i] = true;
  for (size_t i = places_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(i);
  }
  const auto layout = layout_of_rank_0(assign(order));
  const bool same =
      std::equal(layout.begin(), layout.end(), buckets_.begin(), buckets_.end(),
                 [](const auto& parameters, const Bucket& bucket) { return parameters == bucket.parameters; });
  if (same) return true;
  make_buckets(layout);
  return true;
}

std::vector<std::vector<size_t>> Reducer::layout_of_rank_0(const std::vector<std::vector<size_t>>& own) const {
  // All indices, then the sizes of the buckets; zeros follow.
  const size_t count = places_.size();
  std::vector<int64_t> message(2 * count, 0);
  size_t at = 0;
  for (size_t b = 0; b < own.size(); ++b) {
    for (size_t i : own[b]) message[at++] = static_cast<int64_t>(i);
    message[count + b] = static_cast<int64_t>(own[b].size());
  }
  group_.broadcast(std::span(message), group_.global_rank(0)).wait();
  std::vector<std::vector<size_t>> layout;
  at = 0;
  for (size_t b = 0; b < count && message[count + b] > 0; ++b) {
    layout.emplace_back();
    for (int64_t i = 0; i < message[count + b]; ++i) layout.back().push_back(static_cast<size_t>(message[at++]));
  }
  return layout;
}

}  // namespace chorale::reducer
