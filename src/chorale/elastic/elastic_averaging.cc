// Jobs that average their parameters now and then.
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/elastic/elastic.h"
#include "chorale/reducer/copy_values.h"

namespace chorale::elastic {

void Elastic::keep_averager(std::function<std::unique_ptr<parallel::ModelAverager>(const comm::Group&)> make) {
  CHORALE_CHECK(make, "[elastic] a function is needed that makes what averages parameters for a group of ranks");
  CHORALE_CHECK_STATE(model_,
                      "[elastic] what is averaged are parameters that each rank has as a whole: call "
                      "keep(model, optimizer) first");
  make_averager_ = std::move(make);
}

void Elastic::make_averager() {
  if (!make_averager_) return;
  averager_ = make_averager_(group());
  averager_->set_step(averaged_);
}

// Called behind a step. The averages of a rank that waits at their commit point, which others have passed, are whole.
void Elastic::average() {
  watch(Phase::kAverage);
  averager_->set_step(averaged_);
  step_epoch_ = epoch_;
  const std::vector<Tensor> parameters = optimizer_->parameters(), averages = averager_->averages(parameters);
  if (averages.empty()) {
    ++averaged_;
    return;
  }
  const std::function<void()> take = [&] {
    for (size_t i = 0; i < averages.size(); ++i) reducer::copy_values(averages[i], parameters[i]);
  };
  struct Averaging {
    Elastic* job;
    ~Averaging() {
      job->pending_ = nullptr;
      job->averaging_ = false;
    }
  } const averaging{this};
  pending_ = &take;
  pending_values_ = {};
  averaging_ = true;
  try {
    pass({});
  } catch (const CommError& error) {
    if (!seat_) throw;
    regroup(error.what());
    return;  // they are made again, unless some rank had passed
  }
  sums_.clear();
  apply();
}

}  // namespace chorale::elastic
