#include "chorale/reducer/reducer.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/sparse.h"
#include "chorale/device/stream.h"
#include "chorale/reducer/copy_values.h"
#include "chorale/reducer/sparse_entries.h"
#include "chorale/trace/trace.h"

namespace chorale::reducer {

Reducer::Reducer(comm::Group group, GradientOwner& owner, std::vector<GradientInfo> gradients,
                 const ReducerOptions& options)
    : group_(std::move(group)), owner_(owner), gradients_(std::move(gradients)), options_(options) {
  places_.resize(gradients_.size());
  used_map_ = Tensor::empty({static_cast<int64_t>(gradients_.size())}, DType::kI32);
  fill_zero(used_map_);
  for (const GradientInfo& info : gradients_) {
    if (!info.sparse) arenas_.add_room(dtype_in_bucket(info), info.device, count_elems(info.sizes));
  }
  make_buckets(assign({}));
  choose_progress();
}

Reducer::~Reducer() {
  for (size_t i = 0; i < places_.size(); ++i) owner_.set_destination(i, {});
}

bool Reducer::finds_unused() const { return options_.find_unused != FindUnused::kOff && !options_.static_graph; }

// With search on, graphs may differ from rank to rank and step to step: the order seen means nothing.
bool Reducer::rebuilds() const { return options_.static_graph || options_.find_unused != FindUnused::kOn; }

void Reducer::choose_progress() {
  const int size = group_.size();
  progress_ = options_.progress;
  if (size > 1 && group_.moves_by_itself()) {
    progress_ = Progress::kGroup;
  } else if (progress_ == Progress::kAuto || progress_ == Progress::kGroup) {
    const int wanted = size * (thread_count() + 1);
    progress_ = size > 1 && static_cast<int>(std::thread::hardware_concurrency()) >= wanted ? Progress::kHelper
                                                                                            : Progress::kCaller;
  }
  helper_.reset();
  if (progress_ == Progress::kHelper && size > 1) helper_ = std::make_unique<comm::ProgressThread>(group_.engine());
}

double Reducer::factor() const { return 1.0 / divisor_.value_or(std::max(group_.size(), 1)); }

// Which reduction, and which part of it: so that ranks that disagree get an error instead of each other's gradients.
uint64_t Reducer::tag(size_t part) const { return static_cast<uint64_t>(reductions_) << 20 | part; }

size_t Reducer::bucket_bytes(size_t index) const {
  size_t bytes = 0;
  for (size_t i : buckets_[index].parameters) {
    bytes += static_cast<size_t>(count_elems(gradients_[i].sizes)) * size_of(gradients_[i].dtype);
  }
  return bytes;
}

std::string Reducer::describe(std::span<const size_t> parameters) const {
  std::string text;
  for (size_t i : parameters) text += concat(text.empty() ? "" : ", ", i, " (", gradients_[i].name, ")");
  return text;
}

// ---- how buckets come to be (Note [Bucket order])

namespace {
constexpr size_t kFirstBucketBytes = 1 << 20, kBucketBytes = 25 << 20;
}  // namespace

// Before the order of gradients is known, small buckets would wait for each other in vain: one for all is enough,
// unless there will be no others.
std::vector<size_t> Reducer::limits(bool first) const {
  if (first && rebuilds() && owners_.empty()) return {std::numeric_limits<size_t>::max()};
  if (options_.bucket_cap_bytes) return {*options_.bucket_cap_bytes};
  return {kFirstBucketBytes, kBucketBytes};
}

BucketLayout Reducer::assign(std::span<const size_t> order) const {
  std::vector<BucketItem> items;
  for (const GradientInfo& info : gradients_) {
    items.push_back(
        {static_cast<size_t>(count_elems(info.sizes)) * size_of(info.dtype), info.dtype, info.device, info.sparse});
  }
  auto buckets = assign_buckets(items, limits(order.empty()), order).buckets;
  // The last parameters get their gradients first.
  if (order.empty()) std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

DType Reducer::dtype_in_bucket(const GradientInfo& info) const {
  return options_.reduce_dtype && is_floating(info.dtype) ? *options_.reduce_dtype : info.dtype;
}

void Reducer::make_buckets(const BucketLayout& layout) {
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
  arenas_.start_over(any_old);
  buckets_.clear();
  for (const std::vector<size_t>& parameters : layout) {
    if (!owners_.empty()) {
      for (const size_t i : parameters) {
        places_[i].bucket = buckets_.size();
        places_[i].view = {};
        places_[i].is_gradient = false;
        owner_.set_destination(i, {});
      }
      buckets_.push_back({.parameters = parameters, .buffer = {}, .views = {}});
      continue;
    }
    if (gradients_[parameters[0]].sparse) {
      Place& place = places_[parameters[0]];
      place.bucket = buckets_.size();
      place.is_gradient = false;
      buckets_.push_back({.parameters = parameters, .buffer = {}, .views = {}});
      continue;
    }
    const DType dtype = dtype_in_bucket(gradients_[parameters[0]]);
    int64_t elems = 0;
    for (size_t i : parameters) elems += count_elems(gradients_[i].sizes);
    auto [arena, offset] = arenas_.cut(dtype, gradients_[parameters[0]].device, elems);
    Bucket bucket{.parameters = parameters, .buffer = arena.view_as({elems}, {1}, offset), .views = {}};
    for (size_t i : parameters) {
      const GradientInfo& info = gradients_[i];
      // A gradient is laid out like its parameter if that is dense.
      const Strides strides = is_dense(info.sizes, info.strides) ? info.strides : contiguous_strides(info.sizes);
      Place& place = places_[i];
      place.bucket = buckets_.size();
      place.view = arena.view_as(info.sizes, strides, offset);
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
  if (!owners_.empty()) forget_kept();
  // The first backward of a static graph reduces everything at its end, and shows no order.
  if (rebuilt_ || !rebuilds() || running_ || reductions_ < (options_.static_graph ? 2 : 1)) return false;
  rebuilt_ = true;
  std::vector<size_t> order = ready_order_;
  std::vector<bool> seen(places_.size());
  for (size_t i : order) seen[i] = true;
  for (size_t i = places_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(i);
  }
  const auto layout = layout_of_rank_0(group_, assign(order), places_.size());
  const bool same =
      std::equal(layout.begin(), layout.end(), buckets_.begin(), buckets_.end(),
                 [](const auto& parameters, const Bucket& bucket) { return parameters == bucket.parameters; });
  if (same) return true;
  make_buckets(layout);
  return true;
}

// ---- before backward

void Reducer::check_finished() const {
  if (!running_) [[likely]]
    return;
  std::vector<size_t> absent;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i].ready) absent.push_back(i);
  }
  const char* advice = "";
  if (options_.static_graph) {
    advice = "the graph is declared static, but these parameters were used before";
  } else if (options_.find_unused == FindUnused::kOff) {
    advice = "set find_unused_parameters to auto or on if some parameters are not used in every step";
  } else {
    advice =
        "find_unused_parameters is not off, so backward must have been left by an exception: change the process "
        "group to go on";
  }
  throw StateError(concat("[ddp] rank ", group_.rank(), " of ", group_.size(),
                          ": the reduction of the previous step did not finish; parameters without gradient: ",
                          absent.empty() ? "none" : describe(absent),
                          ". All outputs of forward must take part in the loss on every rank; ", advice));
}

bool Reducer::begin_backward(bool elsewhere) {
  if (!expecting_ || running_) return false;
  running_ = true;
  elsewhere_ = elsewhere;
  for (size_t i = 0; i < places_.size() && elsewhere; ++i) {
    if (places_[i].is_gradient) owner_.move_out(i, places_[i].view);
  }
  if (recording_times_) times_ = {.backward_start = Clock::now(), .backward_end = {}, .comm_start = {}, .comm_end = {}};
  if (!rebuilt_) ready_order_.clear();
  if (options_.static_graph && !first_static_backward()) {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].times == 0) arrived(i);
    }
  }
  return true;
}

// ---- gradients

void Reducer::mark_ready(size_t index) {
  Place& place = places_[index];
  place.used = true;
  if (!running_) return;
  place.fired = true;
  if (options_.static_graph) {
    ++place.times_so_far;
    if (first_static_backward()) return;
    CHORALE_CHECK_STATE(place.times_so_far <= place.times, "[ddp] rank ", group_.rank(), ": parameter ",
                        describe({&index, 1}), " got gradient number ", place.times_so_far,
                        " of this backward, but the graph is declared static and gave it ", place.times,
                        " in the first one: the graph has changed");
    if (place.times_so_far < place.times) return;
  }
  CHORALE_CHECK_STATE(!place.ready, "[ddp] rank ", group_.rank(), ": parameter ", describe({&index, 1}),
                      " became ready twice in one backward, when its gradient may be reduced already: a parameter used "
                      "in several backward passes inside one (reentrant checkpointing) needs a static graph");
  if (!rebuilt_) ready_order_.push_back(index);
  arrived(index);
}

void Reducer::arrived(size_t index) {
  put_into_bucket(index);
  places_[index].ready = true;
  --missing_;
  if (--buckets_[places_[index].bucket].pending == 0) launch_full_buckets();
}

void Reducer::put_into_bucket(size_t index) {
  if (gradients_[index].sparse || !owners_.empty()) return;  // it is fetched when its bucket is reduced
  Place& place = places_[index];
  const Tensor gradient = owner_.gradient(index);
  CHORALE_CHECK_STATE(
      !gradient.defined() || !gradient.is_sparse(), "[ddp] rank ", group_.rank(), ": the gradient of parameter ",
      describe({&index, 1}),
      " is sparse, which was not announced: only the tables of nn::Embedding have sparse gradients here");
  if (!gradient.defined()) {
    fill_zero(place.view);
  } else if (!is_gradient(place)) {
    copy_values(gradient, place.view);
  } else if (!same_place(gradient, place.view)) {
    copy_values(gradient, place.view);
    owner_.set_gradient(index, place.view);
  }
}

void Reducer::mark_rest_unused() {
  for (size_t i = 0; i < places_.size() && missing_ > 0; ++i) {
    Place& place = places_[i];
    if (place.ready) continue;
    if (!place.used && is_gradient(place)) {
      // Should nobody have used it, its gradient stays as it is.
      if (const Tensor gradient = owner_.gradient(i); gradient.defined()) preserved_.emplace_back(i, copy_of(gradient));
    }
    arrived(i);
  }
}

// ---- buckets

void Reducer::launch_full_buckets() {
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) {
    launch(buckets_[next_], next_);
    ++next_;
  }
}

void Reducer::launch(Bucket& bucket, size_t index) {
  if (is_sparse(bucket)) return;
  if (recording_times_ && index == 0) times_.comm_start = Clock::now();
  if (trace::enabled()) [[unlikely]]
    bucket.launched = Clock::now();
  if (!owners_.empty()) {
    launch_to_owners(bucket, index);
  } else if (hook_.run) {
    bucket.future = run_hook(bucket, index, bucket.buffer);
  } else {
    bucket.work =
        group_.all_reduce(bucket.buffer, comm::premultiplied_sum(factor()), {.tag = tag(index), .timeout = {}});
  }
  if (helper_) helper_->wake();
}

comm::Future Reducer::run_hook(const Bucket& bucket, size_t index, const Tensor& buffer) {
  GradBucket seen(index, index + 1 == buckets_.size(), buffer, bucket.views, bucket.parameters, group_);
  return hook_.run(seen);
}

Tensor Reducer::average_sparse(const Bucket& bucket, size_t index, const Tensor& own) const {
  const GradientInfo& info = gradients_[bucket.parameters[0]];
  return comm::sparse_on(
      group_.sparse_all_reduce(entries_of(own, info.sizes, info.dtype, factor()), {.tag = tag(index), .timeout = {}}),
      info.device);
}

void Reducer::wait_for(Bucket& bucket, size_t index) {
  if (!owners_.empty()) return end_to_owners(bucket, index);
  if (!bucket.future) {
    // On a device the order of its streams suffices: the host goes on.
    Stream stream = current_stream(bucket.buffer.device());
    bucket.work.wait(stream);
    if (bucket.launched != Clock::time_point{}) [[unlikely]]
      note(bucket, index);
    bucket.work = {};
    return;
  }
  const Tensors result = std::exchange(bucket.future, {})->wait();
  if (bucket.launched != Clock::time_point{}) [[unlikely]]
    note(bucket, index);
  CHORALE_CHECK_STATE(result.size() == 1 && result[0].defined() && result[0].sizes() == bucket.buffer.sizes() &&
                          result[0].dtype() == bucket.buffer.dtype(),
                      "[ddp] rank ", group_.rank(), ": the hook ", hook_.name, " must return one tensor of ",
                      bucket.buffer.dtype(), " and shape ", bucket.buffer.sizes(), " for bucket ", index, ", not ",
                      result.size() == 1 && result[0].defined() ? concat(result[0].dtype(), " ", result[0].sizes())
                                                                : concat(result.size(), " tensors"));
  if (!same_place(result[0], bucket.buffer)) copy_values(result[0], bucket.buffer);
}

// The end of a bucket in the trace. Only a plain reduction on the CPU knows when it was done; a hook's future does not
// say it, and a device may still be copying. For those two the end is the moment at which this thread has stopped
// waiting.
void Reducer::note(Bucket& bucket, size_t index) const {
  trace::record(
      {.name = concat("bucket ", index),
       .rank = group_.global_rank(group_.rank()),
       .start = std::exchange(bucket.launched, {}),
       .end = hook_.run || gradients_[bucket.parameters[0]].device != kCpu ? Clock::now() : bucket.work.completed_at(),
       .async = true,
       .kind = trace::Kind::kBucket});
}

void Reducer::launch_used_map() {
  std::exchange(used_work_, {}).wait();  // of the reduction before
  const std::span<int32_t> map = used_map_.span<int32_t>();
  for (size_t i = 0; i < places_.size(); ++i) map[i] = places_[i].used;
  used_work_ = group_.all_reduce(used_map_, Reduce::kSum, {.tag = tag((1 << 20) - 1), .timeout = {}});
}

std::vector<int32_t> Reducer::used_map() const {
  used_work_.wait();
  return used_map_.to_vector<int32_t>();
}

// ---- the end of backward

void Reducer::end_backward() {
  if (!running_) return;
  if (recording_times_) times_.backward_end = Clock::now();
  if (first_static_backward()) {
    for (Place& place : places_) place.times = place.times_so_far;
  }
  if (finds_unused() || first_static_backward()) {
    const trace::Span span("search_unused_parameters", trace::Kind::kSpan, group_.global_rank(group_.rank()));
    mark_rest_unused();
    launch_used_map();
  }
  if (missing_ == 0) finish();
}

void Reducer::finish() {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (!is_sparse(buckets_[i])) wait_for(buckets_[i], i);
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    if (is_sparse(bucket)) bucket.buffer = average_sparse(bucket, i, owner_.gradient(bucket.parameters[0]));
  }
  if (recording_times_) times_.comm_end = Clock::now();

  std::swap(before_unused_, last_unused_);
  last_unused_.clear();
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i].used) last_unused_.push_back(i);
  }
  if (reductions_ > 0 && last_unused_ != before_unused_) looks_static_ = false;
  // Only a rank that left a parameter unused has to know whether others used it.
  if (!last_unused_.empty()) used_work_.wait();
  const std::span<const int32_t> map = used_map_.span<const int32_t>();
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i].used && map[i] == 0) continue;
    take_out_of_bucket(i);
    if (owners_.empty() || is_own(i)) owner_.complete(i);
  }
  for (const auto& [index, value] : preserved_) {
    if (map[index] == 0) copy_values(value, places_[index].view);
  }
  end_reduction();
}

void Reducer::take_out_of_bucket(size_t index) {
  if (!owners_.empty()) return take_from_owner(index);
  const Place& place = places_[index];
  if (gradients_[index].sparse) {
    owner_.set_gradient(index, std::exchange(buckets_[place.bucket].buffer, {}));
    return;
  }
  if (is_gradient(place)) {
    if (!place.fired) owner_.set_gradient(index, place.view);
    return;
  }
  const Tensor gradient = owner_.gradient(index);
  if (gradient.defined()) return copy_values(place.view, gradient);
  const GradientInfo& info = gradients_[index];
  const Tensor fresh = Tensor::empty_strided(info.sizes, place.view.strides(), info.dtype, info.device);
  copy_values(place.view, fresh);
  owner_.set_gradient(index, fresh);
}

void Reducer::end_reduction() {
  ++reductions_;
  start_over();
  forget_usage();
}

void Reducer::forget_usage() {
  for (Place& place : places_) place.used = false;
  divisor_.reset();
}

void Reducer::start_over() {
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.work = {};
    bucket.sent.clear();
    bucket.future.reset();
  }
  for (Place& place : places_) {
    if (!owners_.empty()) place.view = {};
    place.ready = place.fired = false;
    place.times_so_far = 0;
  }
  next_ = 0;
  missing_ = places_.size();
  preserved_.clear();
  running_ = elsewhere_ = false;
}

void Reducer::shadow_backward(bool wanted) {
  if (!owners_.empty()) return shadow_to_owners(wanted);
  for (size_t i = 0; i < buckets_.size(); ++i) {
    // The buckets themselves hold the gradients of the last step.
    const Bucket& bucket = buckets_[i];
    if (is_sparse(bucket)) continue;
    Bucket zeros{.parameters = bucket.parameters, .buffer = copy_of(bucket.buffer), .views = {}};
    fill_zero(zeros.buffer);
    for (const Tensor& view : bucket.views) {
      zeros.views.push_back(zeros.buffer.view_as(view.sizes(), view.strides(), view.offset() - bucket.buffer.offset()));
    }
    launch(zeros, i);
    wait_for(zeros, i);
    if (!wanted) continue;
    copy_values(zeros.buffer, bucket.buffer);
    for (const size_t parameter : bucket.parameters) take_out_of_bucket(parameter);
  }
  if (finds_unused() || first_static_backward()) launch_used_map();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (is_sparse(buckets_[i])) average_sparse(buckets_[i], i, {});
  }
  end_reduction();
}

}  // namespace chorale::reducer
