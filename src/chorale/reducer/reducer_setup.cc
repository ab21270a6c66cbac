// What is chosen before training, or changed in it: a hook, a static graph, another group; and gradients with owners
// (Note [Owners]).
#include <tuple>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/device/stream.h"
#include "chorale/reducer/copy_values.h"
#include "chorale/reducer/reducer.h"

namespace chorale::reducer {

void Reducer::set_hook(CommHook hook) {
  CHORALE_CHECK(hook.run, "[ddp] a communication hook must be a function, not null");
  CHORALE_CHECK_STATE(!hook_.run, "[ddp] there is a communication hook already, ", hook_.name,
                      "; a second one cannot be registered");
  CHORALE_CHECK_STATE(owners_.empty(), "[ddp] the hook ", hook.name,
                      " would give every rank all averages, but gradients have owners; choose one of the two");
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
  CHORALE_CHECK_STATE(owners_.empty() || !group.is_member() || group.size() == owner_count_,
                      "[ddp] gradients belong to ", owner_count_, " ranks, but the new group has ", group.size(),
                      "; wrap the module anew");
  helper_.reset();
  used_work_ = {};
  start_over();
  forget_usage();
  // Ranks of the new group may never have seen the order by which buckets were rebuilt: all begin with the first ones.
  if (std::exchange(rebuilt_, false) && owners_.empty()) make_buckets(assign({}));
  group_ = std::move(group);
  choose_progress();
  reductions_ = 0;
  expecting_ = false;
  ready_order_.clear();
}

// ---- owners

void Reducer::set_owners(std::vector<int> owners) {
  CHORALE_CHECK_STATE(reductions_ == 0 && !running_, "[ddp] rank ", group_.rank(),
                      ": owners of gradients are chosen before training, not after ", reductions_, " steps");
  CHORALE_CHECK_STATE(!hook_.run, "[ddp] the hook ", hook_.name,
                      " gives every rank all averages; gradients cannot have owners beside it");
  CHORALE_CHECK(owners.size() == gradients_.size(), "[ddp] there are ", gradients_.size(), " gradients, but ",
                owners.size(), " owners");
  for (size_t i = 0; i < owners.size(); ++i) {
    CHORALE_CHECK(owners[i] >= 0 && owners[i] < group_.size(), "[ddp] the gradient of ", gradients_[i].name,
                  " cannot belong to rank ", owners[i], " of a group of ", group_.size());
    CHORALE_CHECK(!gradients_[i].sparse, "[ddp] the gradient of ", gradients_[i].name,
                  " is sparse, and all ranks need all of it; make it dense, or let gradients have no owners");
  }
  owners_ = std::move(owners);
  owner_count_ = group_.size();
  make_buckets(assign({}));
  arenas_.start_over(true);  // their memory goes
}

// An average that a zero_grad() has dropped since.
void Reducer::forget_kept() {
  for (size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (place.kept.defined() && !owner_.gradient(i).is(place.kept)) place.kept = {};
  }
}

// What this rank adds to a sum: its gradient itself where that is possible. Accumulating onto an average, which only
// its owner has, would count that once instead of once for each rank.
Tensor Reducer::contribution(size_t index) {
  const GradientInfo& info = gradients_[index];
  Place& place = places_[index];
  const Tensor gradient = owner_.gradient(index);
  const bool is_old = gradient.defined() && place.kept.defined() && gradient.is(place.kept);
  CHORALE_CHECK_STATE(!is_old || !place.used, "[ddp] rank ", group_.rank(), ": the gradient of ", info.name,
                      " was averaged before, and its owner alone has that: call zero_grad() before each backward that "
                      "is reduced, and accumulate inside of no_sync()");
  if (!is_old) place.kept = {};
  const DType dtype = dtype_in_bucket(info);
  if (gradient.defined() && !is_old) {
    CHORALE_CHECK_STATE(!gradient.is_sparse(), "[ddp] rank ", group_.rank(), ": the gradient of parameter ",
                        describe({&index, 1}), " is sparse, which was not announced");
    if (gradient.dtype() == dtype && gradient.is_contiguous()) return gradient;
  }
  const Tensor fresh = Tensor::empty(info.sizes, dtype, info.device);
  if (gradient.defined() && !is_old) {
    copy_values(gradient, fresh);
  } else {
    fill_zero(fresh);
  }
  return fresh;
}

void Reducer::launch_to_owners(Bucket& bucket, size_t index, bool zeros) {
  if (index > 0) end_to_owners(buckets_[index - 1], index - 1);
  bucket.sent.clear();
  for (const size_t i : bucket.parameters) {
    if (!zeros) {
      bucket.sent.push_back(contribution(i));
      continue;
    }
    bucket.sent.push_back(Tensor::empty(gradients_[i].sizes, dtype_in_bucket(gradients_[i]), gradients_[i].device));
    fill_zero(bucket.sent.back());
  }
  comm::Coalescing together(group_);
  for (size_t k = 0; k < bucket.sent.size(); ++k) {
    std::ignore = group_.reduce(bucket.sent[k], group_.global_rank(owners_[bucket.parameters[k]]),
                                comm::premultiplied_sum(factor()), {.tag = tag(index), .timeout = {}});
  }
  bucket.work = together.end();
}

void Reducer::end_to_owners(Bucket& bucket, size_t index) {
  if (bucket.sent.empty()) return;  // it has ended
  Stream stream = current_stream(bucket.sent[0].device());
  bucket.work.wait(stream);
  if (bucket.launched != Clock::time_point{}) [[unlikely]]
    note(bucket, index);
  bucket.work = {};
  for (size_t k = 0; k < bucket.sent.size(); ++k) {
    const size_t i = bucket.parameters[k];
    if (is_own(i)) {
      places_[i].view = bucket.sent[k];
    } else if (places_[i].used) {
      owner_.set_gradient(i, {});
    }
  }
  bucket.sent.clear();
}

void Reducer::take_from_owner(size_t index) {
  if (!is_own(index)) return owner_.set_gradient(index, {});
  Place& place = places_[index];
  const GradientInfo& info = gradients_[index];
  Tensor average = std::exchange(place.view, {});
  CHORALE_CHECK_STATE(!place.kept.defined(), "[ddp] rank ", group_.rank(), ": the gradient of ", info.name,
                      " was averaged before, and others used the parameter again: call zero_grad() before each "
                      "backward that is reduced");
  if (average.dtype() != info.dtype) {
    const Tensor cast = Tensor::empty(info.sizes, info.dtype, info.device);
    copy_values(average, cast);
    average = cast;
  }
  const Tensor gradient = owner_.gradient(index);
  if (!gradient.defined() || !gradient.is(average)) owner_.set_gradient(index, average);
  if (!elsewhere_) place.kept = average;
}

void Reducer::shadow_to_owners(bool wanted) {
  forget_kept();
  for (size_t b = 0; b < buckets_.size(); ++b) launch_to_owners(buckets_[b], b, true);
  if (!buckets_.empty()) end_to_owners(buckets_.back(), buckets_.size() - 1);
  for (size_t i = 0; i < places_.size() && wanted; ++i) {
    if (!is_own(i)) continue;
    places_[i].kept = {};  // what it had is used up: the average takes its place
    take_from_owner(i);
  }
  if (finds_unused() || first_static_backward()) launch_used_map();
  end_reduction();
}

}  // namespace chorale::reducer
