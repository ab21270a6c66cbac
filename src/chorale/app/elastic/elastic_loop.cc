#include "chorale/app/elastic/elastic_loop.h"

#include <limits>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/elastic/batches.h"
#include "chorale/elastic/elastic.h"

namespace chorale::app {
namespace {

class ElasticLoop final : public train::StepLoop {
 public:
  ElasticLoop()
      : job_({.rebuild = [this](const comm::Group&) { calls_->changed(); },
              .before_change = [this] { calls_->before_change(); }}) {
    const auto size = config::env("WORLD_SIZE");
    CHORALE_CHECK(size, "[elastic] a rank of chorale train --elastic is started by it, with WORLD_SIZE");
    first_size_ = std::stoi(*size);
  }

  const comm::Group& group() override { return job_.group(); }
  int first_size() const override { return first_size_; }

  train::Share deal(std::shared_ptr<const data::Sampler> order, int64_t batch, int64_t largest, bool local) override {
    const int rank = job_.group().rank(), ranks = job_.group().size();
    const auto pieces =
        std::make_shared<elastic::Pieces>(std::move(order), elastic::Pieces::Options{.batch = batch,
                                                                                     .largest = largest,
                                                                                     .rank = rank,
                                                                                     .ranks = ranks,
                                                                                     .local = local,
                                                                                     .first_ranks = first_size_});
    const int64_t own = pieces->samples_of_step();
    return {.pieces = pieces,
            .pieces_of_step = pieces->pieces_of_step(),
            .examples = local ? static_cast<double>(own) : static_cast<double>(batch) / ranks,
            .examples_of_all = local ? own * ranks : batch,
            .lr_scale = local ? static_cast<double>(ranks) / first_size_ : 1.0};
  }

  bool run(parallel::DataParallelBase& model, optim::Optimizer& optimizer, const Calls& calls) override {
    job_.keep(model, optimizer);
    return run(calls);
  }
  bool run_parts(const PartsCalls& parts, const Calls& calls) override {
    const auto make = [&parts](const comm::Group& group) {
      Parts made = parts.make(group);
      return elastic::Sharded{.parameters = std::move(made.parameters),
                              .buffers = std::move(made.buffers),
                              .optimizer = made.optimizer,
                              .owner = std::move(made.owner),
                              .has_replicas = made.has_replicas};
    };
    job_.keep_sharded(make, {.copy_every = parts.copy_every, .save_every = 0, .lost = parts.lost});
    return run(calls);
  }

  void commit(std::span<double> values, const std::function<void()>& update) override {
    job_.step(update, values);
    for (; told_ < job_.changes().size(); ++told_) {
      const elastic::Change& change = job_.changes()[told_];
      if (change.epoch == 1) continue;  // the start
      const std::chrono::duration<double, std::milli> cost = std::chrono::steady_clock::now() - change.noticed;
      calls_->event({.epoch = change.epoch,
                     .cause = change.cause,
                     .ranks = change.size,
                     .newcomers = change.newcomers,
                     .repeated = change.repeated,
                     .cost_ms = cost.count(),
                     .verdict_ms = change.verdict_ms,
                     .agreement_ms = change.agreement_ms,
                     .regroup_ms = change.regroup_ms,
                     .transfer_ms = change.transfer_ms});
    }
  }

  void stop() override { job_.stop(); }

 private:
  bool run(const Calls& calls) {
    calls_ = &calls;
    job_.keep("place", calls.save, calls.load);
    job_.keep("rest", calls.save_rest, calls.load_rest, true);
    try {
      job_.run(std::numeric_limits<int64_t>::max(), [&](int64_t) { calls.step(); });
    } catch (const elastic::Excluded&) {
      return false;
    }
    return true;
  }

  elastic::Elastic job_;
  int first_size_ = 1;
  const Calls* calls_ = nullptr;
  size_t told_ = 0;
};

}  // namespace

std::unique_ptr<train::StepLoop> elastic_loop() { return std::make_unique<ElasticLoop>(); }

}  // namespace chorale::app
