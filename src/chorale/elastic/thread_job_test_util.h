// A job whose ranks are threads, with the launcher's own decisions.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/elastic/job_test_util.h"
#include "chorale/launch/epochs.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::elastic {

class Threads {
 public:
  Threads(int ranks, int64_t steps, std::vector<Kill> kills, std::optional<ShardedJob> sharded = {})
      : ranks_(ranks), steps_(steps), kills_(std::move(kills)), sharded_(std::move(sharded)) {
    epochs_.emplace(launch::Epochs::Plan{
        .limits = {1, ranks}, .ranks = ranks, .store = store_, .board = board_, .patience = std::chrono::seconds(20)});
  }
  // On rank 0, before it begins this step.
  std::function<void(int64_t)> before_step;
  bool replaces = true;
  // Ranks end with errors, which are kept instead of being failures.
  bool may_fail = false;
  std::vector<std::string> errors;

  // What each rank that came to the end has; by members.
  std::map<int, JobResult> run() {
    for (int member = 0; member < ranks_; ++member) start(member);
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        for (const auto& [member, how] : std::exchange(ended_, {})) {
          threads_[member].join();
          threads_.erase(member);
          epochs_->ended(member, how);
        }
        if (threads_.empty()) break;
        if (replaces) {
          for (const int slot : epochs_->vacancies()) start(epochs_->started(slot));
        }
        if (const auto problem = epochs_->look(); problem && !may_fail) ADD_FAILURE() << *problem;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::move(results_);
  }
  // As from `chorale resize`.
  void resize(int ranks) {
    const std::lock_guard lock(mutex_);
    epochs_->resize(ranks);
  }
  // The last epoch that was stated.
  transport::Epoch latest() const {
    return transport::Epoch::parse(
        store_->get(transport::epoch_key(board_->latest()), within(std::chrono::seconds(5))));
  }

 private:
  struct Death {};

  void start(int member) {
    threads_[member] = std::thread([this, member] {
      std::optional<std::string> how = "died: on schedule";
      try {
        JobResult result = run_job({.seat = {store_, board_, member},
                                    .steps = steps_,
                                    .ranks = ranks_,
                                    .kills = kills_,
                                    .die = [] { throw Death(); },
                                    .before_step = before_step,
                                    .sharded = sharded_});
        how.reset();
        const std::lock_guard lock(mutex_);
        results_[member] = std::move(result);
      } catch (const Death&) {
      } catch (const Excluded&) {
        how.reset();
      } catch (const StateError& error) {
        // A newcomer that the others did not wait for.
        if (!may_fail && !store_->contains(transport::kElasticDone, within(std::chrono::seconds(5))))
          ADD_FAILURE() << error.what();
        const std::lock_guard lock(mutex_);
        errors.emplace_back(error.what());
      }
      const std::lock_guard lock(mutex_);
      ended_.emplace_back(member, how);
    });
  }

  const int ranks_;
  const int64_t steps_;
  const std::vector<Kill> kills_;
  const std::optional<ShardedJob> sharded_;
  const std::shared_ptr<transport::Store> store_ = std::make_shared<transport::MemoryStore>();
  const std::shared_ptr<transport::EpochBoard> board_ = transport::EpochBoard::create();
  std::mutex mutex_;
  std::optional<launch::Epochs> epochs_;
  std::map<int, std::thread> threads_;
  std::vector<std::pair<int, std::optional<std::string>>> ended_;
  std::map<int, JobResult> results_;
};

inline void expect_all_alike(const std::map<int, JobResult>& results, int64_t steps) {
  ASSERT_FALSE(results.empty());
  const JobResult& first = results.begin()->second;
  for (const auto& [member, result] : results) {
    SCOPED_TRACE(concat("member ", member));
    expect_undisturbed(result, steps, false);
    EXPECT_EQ(result.bits, first.bits);
    EXPECT_EQ(result.losses, first.losses);
    EXPECT_EQ(result.sizes, first.sizes);
  }
}

}  // namespace chorale::elastic
