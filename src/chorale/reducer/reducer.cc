#include "chorale/reducer/reducer.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/reducer/copy_values.h"
#include "chorale/trace/trace.h"
#include "chorale/vec/combine.h"

namespace chorale::reducer {
namespace {

// Whether the gradient lies in its place in the bucket.
bool same_place(const Tensor& gradient, const Tensor& view) {
  return gradient.is(view) || (gradient.raw() == view.raw() && gradient.storage() == view.storage() &&
                               gradient.strides() == view.strides() && gradient.dtype() == view.dtype());
}

Tensor copy_of(const Tensor& view) {
  Tensor copy = Tensor::empty_strided(view.sizes(), view.strides(), view.dtype());
  copy_values(view, copy);
  return copy;
}

}  // namespace

Reducer::Reducer(comm::Group group, GradientOwner& owner, std::vector<GradientInfo> gradients,
                 const ReducerOptions& options)
    : group_(std::move(group)), owner_(owner), gradients_(std::move(gradients)), options_(options) {
  places_.resize(gradients_.size());
  used_map_ = Tensor::empty({static_cast<int64_t>(gradients_.size())}, DType::kI32);
  fill_zero(used_map_);
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
  const std::string backend = size > 1 ? group_.backend() : "";
  progress_ = options_.progress;
  if (backend == "tls" || backend == "ucx") {
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

bool Reducer::begin_backward() {
  if (!expecting_ || running_) return false;
  running_ = true;
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
  if (gradients_[index].sparse) return;  // it is fetched when its bucket is reduced
  Place& place = places_[index];
  const Tensor gradient = owner_.gradient(index);
  CHORALE_CHECK_STATE(
      !gradient.defined() || !gradient.is_sparse(), "[ddp] rank ", group_.rank(), ": the gradient of parameter ",
      describe({&index, 1}),
      " is sparse, which was not announced: only the tables of nn::Embedding have sparse gradients here");
  if (!gradient.defined()) {
    fill_zero(place.view);
  } else if (!place.is_gradient) {
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
    if (!place.used && place.is_gradient) {
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
  if (hook_.run) {
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

namespace {

// What a rank contributes to the average: rows of a dense gradient are entries, and where there is none there are no
// entries. Division comes before the sum, as for dense ones.
Tensor entries_of(const Tensor& gradient, const GradientInfo& info, double factor) {
  Tensor indices, values;
  if (gradient.defined() && gradient.is_sparse()) {
    indices = gradient.sparse().indices;
    values = Tensor::empty(gradient.sparse().values.sizes(), info.dtype);
    copy_values(gradient.sparse().values, values);
  } else {
    Shape sizes = info.sizes;
    if (!gradient.defined()) sizes[0] = 0;
    indices = Tensor::empty({1, sizes[0]}, DType::kI64);
    std::iota(indices.data<int64_t>(), indices.data<int64_t>() + sizes[0], 0);
    values = Tensor::empty(sizes, info.dtype);
    if (gradient.defined()) copy_values(gradient, values);
  }
  const void* from[] = {values.raw()};
  void* to[] = {values.raw()};
  vec::combine(Reduce::kSum, info.dtype, from, to, values.elems(), factor);
  return Tensor::sparse_coo(indices, values, info.sizes);
}

}  // namespace

Tensor Reducer::average_sparse(const Bucket& bucket, size_t index, const Tensor& own) const {
  return group_.sparse_all_reduce(entries_of(own, gradients_[bucket.parameters[0]], factor()),
                                  {.tag = tag(index), .timeout = {}});
}

void Reducer::wait_for(Bucket& bucket, size_t index) {
  if (!bucket.future) {
    bucket.work.wait();
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

// A hook's future does not tell when it was done; that it is there now is known.
void Reducer::note(Bucket& bucket, size_t index) const {
  trace::record({.name = concat("bucket ", index),
                 .rank = group_.global_rank(group_.rank()),
                 .start = std::exchange(bucket.launched, {}),
                 .end = hook_.run ? Clock::now() : bucket.work.completed_at(),
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
    owner_.complete(i);
  }
  for (const auto& [index, value] : preserved_) {
    if (map[index] == 0) copy_values(value, places_[index].view);
  }
  end_reduction();
}

void Reducer::take_out_of_bucket(size_t index) {
  const Place& place = places_[index];
  if (gradients_[index].sparse) {
    owner_.set_gradient(index, std::exchange(buckets_[place.bucket].buffer, {}));
    return;
  }
  if (place.is_gradient) {
    if (!place.fired) owner_.set_gradient(index, place.view);
    return;
  }
  const Tensor gradient = owner_.gradient(index);
  if (gradient.defined()) return copy_values(place.view, gradient);
  const GradientInfo& info = gradients_[index];
  const Tensor fresh = Tensor::empty_strided(info.sizes, place.view.strides(), info.dtype);
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
    bucket.future.reset();
  }
  for (Place& place : places_) {
    place.ready = place.fired = false;
    place.times_so_far = 0;
  }
  next_ = 0;
  missing_ = places_.size();
  preserved_.clear();
  running_ = false;
}

void Reducer::shadow_backward() {
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
  }
  if (finds_unused() || first_static_backward()) launch_used_map();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (is_sparse(buckets_[i])) average_sparse(buckets_[i], i, {});
  }
  end_reduction();
}

// ---- changes

void Reducer::set_hook(CommHook hook) {
  CHORALE_CHECK(hook.run, "[ddp] a communication hook must be a function, not null");
  CHORALE_CHECK_STATE(!hook_.run, "[ddp] there is a communication hook already, ", hook_.name,
                      "; a second one cannot be registered");
  for (const GradientInfo& info : gradients_) {
    CHORALE_CHECK_STATE(!info.sparse, "[ddp] the hook ", hook.name,
                        " would get buckets of dense gradients, but that of ", info.name,
                        " is sparse; make it dense, or train without a hook");
  }
  hook_ = std::move(hook);
}

bool Reducer::set_static_graph() {
  if (options_.static_graph) return false;
  CHORALE_CHECK_STATE(reductions_ == 0 && !running_, "[ddp] rank ", group_.rank(),
                      ": the graph must be declared static before training, not after ", reductions_, " steps");
  options_.static_graph = true;
  make_buckets(assign({}));
  return true;
}

void Reducer::set_group(comm::Group group) {
  helper_.reset();
  std::exchange(used_work_, {});
  start_over();
  forget_usage();
  group_ = std::move(group);
  choose_progress();
  reductions_ = 0;
  rebuilt_ = false;
  expecting_ = false;
  ready_order_.clear();
}

}  // namespace chorale::reducer
