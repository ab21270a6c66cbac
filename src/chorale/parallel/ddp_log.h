// What a data-parallel wrapper knows of itself: how it is set up, what it did, and how long that took.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "chorale/reducer/reducer.h"

namespace chorale::parallel {

// Lists of numbers are texts: "2 1, 0" has a space inside a bucket and a comma between buckets.
struct DdpLog {
  int world_size = 0;
  int rank = 0;
  std::string module_name;
  std::string device_ids;
  int output_device = -1;
  bool broadcast_buffers = false;
  int64_t bucket_cap_bytes = 0;
  bool find_unused_parameters = false;  // auto or on
  bool gradient_as_bucket_view = false;
  std::string backend_name;
  std::string progress;  // which thread moves reductions while backward computes, and why
  std::string dtypes;
  int64_t total_parameter_size_bytes = 0;
  int64_t num_parameter_tensors = 0;
  std::string bucket_sizes;  // in bytes, as they were at first
  bool is_multi_device_module = false;
  bool has_sync_bn = false;
  bool static_graph = false;
  bool can_set_static_graph = false;
  std::string comm_hook;  // empty: none
  bool join_uneven_inputs = false;
  bool has_error = false;
  std::string error;
  int64_t unused_parameter_size = 0;  // in bytes
  bool has_rebuilt_buckets = false;
  std::string rebuilt_bucket_sizes;
  std::string rebuilt_per_bucket_param_indices;
  std::string prev_iteration_grad_ready_order_indices;

  // These describe the step before the sampled one, `iteration`; times in nanoseconds.
  int64_t iteration = 0;
  int64_t forward_compute_time = 0, backward_compute_time = 0, backward_comm_time = 0,
          backward_compute_comm_overlap_time = 0;
  // Averages over the sampled steps.
  int64_t avg_forward_compute_time = 0, avg_backward_compute_time = 0, avg_backward_comm_time = 0,
          avg_backward_compute_comm_overlap_time = 0;
  // Times are counted from some fixed point.
  int64_t forward_compute_time_start = 0, backward_compute_time_start = 0, backward_compute_time_end = 0,
          backward_comm_time_start = 0, backward_comm_time_end = 0;
  // Variables that the run may depend on; "N/A" where there is none.
  std::map<std::string, std::string> environment;
};

// Collects the part of the log that changes from step to step.
class DdpRecorder {
 public:
  using Clock = reducer::Reducer::Clock;

  // Called at the start of a forward that will be reduced.
  void start_step(reducer::Reducer& reducer);
  void note_error(const std::string& error);
  void note_join() { log_.join_uneven_inputs = true; }
  void set_sample_rate(int64_t steps) { sample_rate_ = steps; }
  const DdpLog& log() const { return log_; }

 private:
  bool samples(int64_t step) const { return step > 0 && (step <= 10 || step % sample_rate_ == 0); }
  void take_times(const reducer::Reducer& reducer);

  DdpLog log_;
  int64_t steps_ = 0;
  int64_t sampled_ = 0;
  int64_t sample_rate_ = 100;
  Clock::time_point forward_start_;
};

// The part that follows from the reducer and its parameters.
void describe(const reducer::Reducer& reducer, DdpLog& log);

}  // namespace chorale::parallel
