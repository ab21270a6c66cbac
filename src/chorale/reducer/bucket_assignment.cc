#include "chorale/reducer/bucket_assignment.h"

#include <algorithm>
#include <numeric>

#include "chorale/base/error.h"

namespace chorale::reducer {
namespace {

// The bucket that items of one dtype and device are put into now.
struct Open {
  DType dtype;
  Device device;
  size_t limit;  // index into limits
  size_t bytes = 0;
  std::vector<size_t> items{};
};

}  // namespace

BucketAssignment assign_buckets(std::span<const BucketItem> items, std::span<const size_t> limits,
                                std::span<const size_t> order) {
  CHORALE_CHECK(!limits.empty(), "[assign_buckets] at least one limit is needed");
  CHORALE_CHECK(order.empty() || order.size() == items.size(), "[assign_buckets] an order of ", order.size(), " for ",
                items.size(), " items");
  BucketAssignment result;
  const auto close = [&](std::vector<size_t> bucket, size_t limit) {
    result.buckets.push_back(std::move(bucket));
    result.limits.push_back(limits[limit]);
  };
  std::vector<Open> open;
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t at = order.empty() ? i : order[i];
    const BucketItem& item = items[at];
    if (item.own_bucket) {
      close({at}, limits.size() - 1);
      continue;
    }
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& bucket) {
      return bucket.dtype == item.dtype && bucket.device == item.device;
    });
    if (found == open.end()) found = open.insert(found, {.dtype = item.dtype, .device = item.device, .limit = 0});
    found->items.push_back(at);
    found->bytes += item.bytes;
    if (found->bytes < limits[found->limit]) continue;
    close(std::exchange(found->items, {}), found->limit);
    found->bytes = 0;
    found->limit = std::min(found->limit + 1, limits.size() - 1);
  }
  for (Open& rest : open) {
    if (!rest.items.empty()) close(std::move(rest.items), rest.limit);
  }
  if (!order.empty()) return result;

  std::vector<size_t> sorted(result.buckets.size());
  std::iota(sorted.begin(), sorted.end(), size_t{0});
  const auto smallest = [&](size_t bucket) {
    return *std::min_element(result.buckets[bucket].begin(), result.buckets[bucket].end());
  };
  std::sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return smallest(a) < smallest(b); });
  BucketAssignment in_order;
  for (size_t bucket : sorted) {
    in_order.buckets.push_back(std::move(result.buckets[bucket]));
    in_order.limits.push_back(result.limits[bucket]);
  }
  return in_order;
}

BucketAssignment assign_buckets(std::span<const Tensor> tensors, std::span<const size_t> limits) {
  std::vector<BucketItem> items;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    CHORALE_CHECK_STATE(!tensor.is_sparse(), "[assign_buckets] tensor ", i, " of shape ", tensor.sizes(),
                        " is sparse; buckets are planned for dense tensors only");
    items.push_back({static_cast<size_t>(tensor.elems()) * tensor.elem_bytes(), tensor.dtype(), tensor.device()});
  }
  return assign_buckets(items, limits);
}

}  // namespace chorale::reducer
