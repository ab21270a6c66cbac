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
    items.push_back({static_cast<size_t>(count_elems(info.sizes)) * size_of(info.dtype), info.dtype, kCpu});
  }
  auto buckets = assign_buckets(items, limits(order.empty()), order).buckets;
  // The last parameters get their gradients first.
  if (order.empty()) std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

void Reducer::make_buckets(const std::vector<std::vector<size_t>>& assignment) {
  std::vector<Tensor> old_views(places_.size());
  for (size_t i = 0; i < places_.size(); ++i) old_views[i] = places_[i].view;
  buckets_.clear();
  for (const std::vector<size_t>& parameters : assignment) {
    const GradientInfo& first = gradients_[parameters[0]];
    const DType dtype = options_.reduce_dtype && is_floating(first.dtype) ? *options_.reduce_dtype : first.dtype;
    int64_t elems = 0;
    for (size_t i : parameters) elems += count_elems(gradients_[i].sizes);
    Bucket bucket{.parameters = parameters, .buffer = Tensor::empty({elems}, dtype), .views = {}};
    int64_t offset = 0;
    for (size_t i : parameters) {
      const GradientInfo& info = gradients_[i];
      // A gradient is laid out like its parameter if that is dense.
      const Strides strides = is_dense(info.sizes, info.strides) ? info.strides : contiguous_strides(info.sizes);
      Place& place = places_[i];
      place.bucket = buckets_.size();
      place.view = bucket.buffer.view_as(info.sizes, strides, offset);
      place.is_gradient = options_.gradient_as_bucket_view && dtype == info.dtype;
      offset += count_elems(info.sizes);
      bucket.views.push_back(place.view);
      if (!place.is_gradient) continue;
      const Tensor gradient = owner_.gradient(i);
      if (gradient.defined() && old_views[i].defined() && gradient.raw() == old_views[i].raw()) {
        copy_values(gradient, place.view);
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
