#include "chorale/parallel/traced_reduction.h"

#include <utility>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/op/collective.h"

namespace chorale::parallel {
namespace {

// From this size on, sending costs more than putting together: 64 KiB take 10 µs, a call by itself 2.
constexpr int64_t kAloneBytes = int64_t{64} << 10;
// Small ones are sent when this much of them has come together.
constexpr int64_t kTogetherBytes = int64_t{256} << 10;

}  // namespace

TracedReduction::TracedReduction(const NamedTensors& parameters, Tensor group)
    : parameters_(parameters), group_(std::move(group)), is_ready_(parameters.size(), false) {}

void TracedReduction::mark_ready(size_t i) {
  const Tensor& parameter = parameters_[i].second;
  CHORALE_CHECK_STATE(
      !is_ready_[i], "[ddp] the gradient of ", parameters_[i].first,
      " arrives twice in one backward of a whole graph, which sends it once; compile without whole_graph");
  is_ready_[i] = has_begun_ = true;
  const int64_t bytes = parameter.elems() * static_cast<int64_t>(parameter.elem_bytes());
  if (bytes >= kAloneBytes) return start({i});
  if (!small_.empty() && parameters_[small_[0]].second.dtype() != parameter.dtype()) {
    start(std::exchange(small_, {}));
    small_bytes_ = 0;
  }
  small_.push_back(i);
  small_bytes_ += bytes;
  if (small_bytes_ < kTogetherBytes) return;
  start(std::exchange(small_, {}));
  small_bytes_ = 0;
}

void TracedReduction::start(std::vector<size_t> parameters) {
  const NoGrad quiet;
  Bucket bucket;
  std::vector<Tensor> parts;
  for (const size_t i : parameters) {
    const Tensor gradient = chorale::gradient(parameters_[i].second);
    parts.push_back(parameters.size() == 1 ? contiguous(gradient) : flatten(gradient));
  }
  bucket.pending = start_average(parts.size() == 1 ? parts[0] : cat(parts), group_);
  bucket.parameters = std::move(parameters);
  buckets_.push_back(std::move(bucket));
}

void TracedReduction::finish() {
  const NoGrad quiet;
  if (!small_.empty()) start(std::exchange(small_, {}));
  for (Bucket& bucket : buckets_) {
    const Tensor average = wait_for(bucket.pending);
    int64_t at = 0;
    for (const size_t i : bucket.parameters) {
      const Tensor& parameter = parameters_[i].second;
      const bool is_alone = bucket.parameters.size() == 1;
      set_gradient(parameter, is_alone ? average : view(narrow(average, 0, at, parameter.elems()), parameter.sizes()));
      at += parameter.elems();
    }
    bucket.pending = Tensor();
    for (const size_t i : bucket.parameters) complete_gradient(parameters_[i].second);
  }
}

}  // namespace chorale::parallel
