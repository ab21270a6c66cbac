#include "chorale/sharding/costs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/tensor/tensor.h"

namespace chorale {
namespace sharding {
namespace {

constexpr CostModel kDefaults;
std::atomic<const CostModel*> current{&kDefaults};

// The median of some calls that put together `bytes` in all, in microseconds.
double gather_us(const comm::Group& group, int64_t bytes) {
  const int64_t each = bytes / group.size();
  const Tensor part = Tensor::empty({each}, DType::kU8), all = Tensor::empty({each * group.size()}, DType::kU8);
  constexpr int kWarmUp = 5, kCalls = 15;
  std::vector<double> us;
  for (int i = 0; i < kWarmUp + kCalls; ++i) {
    const auto start = std::chrono::steady_clock::now();
    group.all_gather_into(all, part).wait();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (i >= kWarmUp) us.push_back(took.count());
  }
  std::nth_element(us.begin(), us.begin() + kCalls / 2, us.end());
  return us[kCalls / 2];
}

void measure_line(const comm::Group& group, bool spans_hosts, CostModel& model) {
  constexpr int64_t kBytes = int64_t{4} << 20;
  constexpr double kLeast = 0.01;  // us: a difference of two times may vanish
  const auto hops = static_cast<double>(group.size() - 1), n = static_cast<double>(group.size());
  const double small = gather_us(group, group.size()), large = gather_us(group, kBytes);
  const double speed = static_cast<double>(kBytes) * hops / n / std::max(large - small, kLeast);
  if (spans_hosts) {
    model.hop_between_hosts = std::max((small - model.start) / hops, kLeast);
    model.share_between_hosts = speed / model.bytes_per_us;
  } else {
    // One line cannot tell the beginning from its hops: they keep the proportion that they have in the defaults.
    model.hop = small / (kDefaults.start / kDefaults.hop + hops);
    model.start = model.hop * kDefaults.start / kDefaults.hop;
    model.bytes_per_us = speed;
  }
}

}  // namespace

const CostModel& cost_model() { return *current.load(std::memory_order_acquire); }

void set_cost_model(const CostModel& model) {
  for (const double value :
       {model.start, model.hop, model.hop_between_hosts, model.bytes_per_us, model.share_between_hosts})
    CHORALE_CHECK(value > 0 && value < 1e12, "[set_cost_model] every constant is a positive number, not ", value);
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<const CostModel>>;  // for ever: a thread may be reading one
  const std::lock_guard lock(mutex);
  current.store(kept->emplace_back(std::make_unique<const CostModel>(model)).get(), std::memory_order_release);
}

CostModel measured_costs(const comm::Mesh& mesh) {
  CostModel model;
  // Lines on one host first: what is between hosts is told in their terms.
  for (const bool spans_hosts : {false, true}) {
    for (size_t m = 0; m < mesh.dims(); ++m) {
      if (mesh.shape()[m] > 1 && mesh.spans_hosts(m) == spans_hosts) measure_line(mesh.group(m), spans_hosts, model);
    }
  }
  const Tensor numbers = Tensor::from(std::vector<double>{model.start, model.hop, model.hop_between_hosts,
                                                          model.bytes_per_us, model.share_between_hosts},
                                      {5});
  for (size_t m = 0; m < mesh.dims(); ++m) {
    const comm::Group& line = mesh.group(m);
    line.broadcast(numbers, line.global_rank(0)).wait();
  }
  const std::vector<double> first = numbers.to_vector<double>();
  return {first[0], first[1], first[2], first[3], first[4]};
}

}  // namespace sharding

void use_measured_costs(const comm::Mesh& mesh) {
  if (mesh.is_member()) sharding::set_cost_model(sharding::measured_costs(mesh));
}

}  // namespace chorale
