#include "chorale/parallel/ddp_log.h"

#include <set>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"

namespace chorale::parallel {
namespace {

using Clock = DdpRecorder::Clock;

int64_t nanoseconds(Clock::duration time) { return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(); }
int64_t stamp(Clock::time_point time) { return nanoseconds(time.time_since_epoch()); }

template <class List>
std::string joined(const List& list, const char* between) {
  std::string text;
  for (const auto& item : list) text += concat(text.empty() ? "" : between, item);
  return text;
}

int64_t bytes_of(const reducer::GradientInfo& info) {
  return count_elems(info.sizes) * static_cast<int64_t>(size_of(info.dtype));
}

// The dtypes' names in C.
const char* c_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float";
    case DType::kF64:
      return "double";
    case DType::kF16:
      return "half";
    case DType::kBF16:
      return "bfloat16";
    default:
      return "complex";
  }
}

std::string sizes_of(const reducer::Reducer& reducer) {
  std::vector<size_t> sizes;
  for (size_t b = 0; b < reducer.bucket_count(); ++b) sizes.push_back(reducer.bucket_bytes(b));
  return joined(sizes, ", ");
}

}  // namespace

void DdpRecorder::start_step(reducer::Reducer& reducer) {
  if (samples(steps_)) [[unlikely]]
    take_times(reducer);
  if (steps_ == 0) log_.bucket_sizes = sizes_of(reducer);
  ++steps_;
  reducer.record_times(samples(steps_));
  if (samples(steps_)) forward_start_ = Clock::now();
}

void DdpRecorder::take_times(const reducer::Reducer& reducer) {
  const reducer::Reducer::Times& times = reducer.times();
  log_.iteration = steps_;
  log_.forward_compute_time_start = stamp(forward_start_);
  log_.backward_compute_time_start = stamp(times.backward_start);
  log_.backward_compute_time_end = stamp(times.backward_end);
  log_.backward_comm_time_start = stamp(times.comm_start);
  log_.backward_comm_time_end = stamp(times.comm_end);
  log_.forward_compute_time = nanoseconds(times.backward_start - forward_start_);
  log_.backward_compute_time = nanoseconds(times.backward_end - times.backward_start);
  log_.backward_comm_time = nanoseconds(times.comm_end - times.comm_start);
  log_.backward_compute_comm_overlap_time =
      std::max<int64_t>(nanoseconds(std::min(times.backward_end, times.comm_end) - times.comm_start), 0);
  const auto average = [this](int64_t& mean, int64_t value) { mean = (mean * sampled_ + value) / (sampled_ + 1); };
  average(log_.avg_forward_compute_time, log_.forward_compute_time);
  average(log_.avg_backward_compute_time, log_.backward_compute_time);
  average(log_.avg_backward_comm_time, log_.backward_comm_time);
  average(log_.avg_backward_compute_comm_overlap_time, log_.backward_compute_comm_overlap_time);
  ++sampled_;
}

void DdpRecorder::note_error(const std::string& error) {
  log_.has_error = true;
  log_.error = error;
}

void describe(const reducer::Reducer& reducer, DdpLog& log) {
  log.world_size = reducer.group().size();
  log.rank = reducer.group().rank();
  log.backend_name = reducer.group().is_member() ? reducer.group().backend() : "";
  const reducer::Progress mover = reducer.progress();
  log.progress =
      concat(mover == reducer::Progress::kHelper  ? "a helper thread"
             : mover == reducer::Progress::kGroup ? "the group's thread"
                                                  : "backward's own thread",
             " (", std::thread::hardware_concurrency(), " cores, ", log.world_size, " ranks of ", thread_count(),
             reducer.options().progress == reducer::Progress::kAuto ? ")" : "; as asked for)");
  log.find_unused_parameters = reducer.options().find_unused != reducer::FindUnused::kOff;
  log.gradient_as_bucket_view = reducer.options().gradient_as_bucket_view;
  log.static_graph = reducer.options().static_graph;
  log.can_set_static_graph = reducer.looks_static();
  log.bucket_cap_bytes = static_cast<int64_t>(reducer.options().bucket_cap_bytes.value_or(size_t{25} << 20));
  if (reducer.hook()) log.comm_hook = reducer.hook()->name;
  std::set<std::string> dtypes;
  for (const reducer::GradientInfo& info : reducer.gradients()) {
    dtypes.insert(c_name(info.dtype));
    log.total_parameter_size_bytes += bytes_of(info);
  }
  log.dtypes = joined(dtypes, ", ");
  log.num_parameter_tensors = static_cast<int64_t>(reducer.gradients().size());
  if (log.bucket_sizes.empty()) log.bucket_sizes = sizes_of(reducer);
  for (size_t i : reducer.unused()) log.unused_parameter_size += bytes_of(reducer.gradients()[i]);
  log.prev_iteration_grad_ready_order_indices = joined(reducer.ready_order(), ", ");
  log.has_rebuilt_buckets = reducer.has_rebuilt();
  if (reducer.has_rebuilt()) {
    log.rebuilt_bucket_sizes = sizes_of(reducer);
    std::vector<std::string> buckets;
    for (size_t b = 0; b < reducer.bucket_count(); ++b) buckets.push_back(joined(reducer.bucket(b), " "));
    log.rebuilt_per_bucket_param_indices = joined(buckets, ", ");
  }
  for (const char* name :
       {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CHORALE_TIMEOUT", "OMP_NUM_THREADS"}) {
    log.environment[name] = config::env(name).value_or("N/A");
  }
  log.environment["CHORALE_DEBUG"] = name_of(debug_level());  // the level in force, whatever the variable said at first
}

}  // namespace chorale::parallel
