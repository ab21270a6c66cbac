#include "chorale/reducer/join.h"

#include "chorale/base/error.h"

namespace chorale::reducer {
namespace {

int32_t agree(const comm::Group& group, int32_t value, Reduce how) {
  group.all_reduce(std::span(&value, 1), how).wait();
  return value;
}

}  // namespace

void join(const std::vector<Joinable*>& joinables, const JoinOptions& options, const std::function<void()>& body) {
  Join scope(joinables, options);
  body();
  scope.finish();
}

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options), live_(Tensor::empty({1}, DType::kI32)) {
  CHORALE_CHECK(!joinables_.empty(), "[join] nothing to join");
  for (Joinable* joinable : joinables_) {
    CHORALE_CHECK(joinable != nullptr, "[join] a joinable is null");
    CHORALE_CHECK_STATE(!joinable->join_, "[join] a joinable is in another join already");
    joinable->join_ = this;
    joinable->note_join(true);
  }
}

Join::~Join() {
  for (Joinable* joinable : joinables_) {
    joinable->join_ = nullptr;
    joinable->note_join(false);
  }
}

void Join::notify(const Joinable& joinable) {
  if (!options_.enabled || &joinable != joinables_[0]) return;
  live_work_.wait();
  *live_.data<int32_t>() = 1;
  live_work_ = group().all_reduce(live_);
  if (!options_.throw_when_one_ends) return;
  const bool one_ended = agree(group(), 0, Reduce::kSum) > 0;
  CHORALE_CHECK_STATE(!one_ended, "[join] rank ", group().rank(),
                      ": another rank has run out of inputs: training ends");
}

int Join::live_ranks() {
  live_work_.wait();
  return *live_.data<int32_t>();
}

void Join::finish() {
  if (!options_.enabled) return;
  bool among_last = true;
  while (true) {
    live_work_.wait();
    *live_.data<int32_t>() = 0;
    live_work_ = group().all_reduce(live_);
    if (live_ranks() == 0) break;
    among_last = false;
    if (options_.throw_when_one_ends) {
      agree(group(), 1, Reduce::kSum);
      throw StateError(concat("[join] rank ", group().rank(), " has run out of inputs: training ends"));
    }
    for (Joinable* joinable : joinables_) joinable->shadow_step(*this);
  }
  const comm::Group& all = group();
  const int authority = agree(all, among_last ? all.rank() : -1, Reduce::kMax);
  for (Joinable* joinable : joinables_) joinable->after_join(all.global_rank(authority));
}

}  // namespace chorale::reducer
