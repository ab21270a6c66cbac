// A job whose ranks are threads, with the launcher's own decisions.
#pragma once

#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/elastic/job_test_util.h"
#include "chorale/launch/epochs.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::elastic {

class Threads {
 public:
  Threads(int ranks, int64_t steps, std::vector<Kill> kills, std::optional<ShardedJob> sharded = {})
      : ranks_(ranks), steps_(steps), kills_(std::move(kills)), sharded_(std::move(sharded)) {
    epochs_.emplace(launch::Epochs::Plan{
        .limits = {1, ranks}, .ranks = ranks, .store = store_, .board = board_, .patience = std::chrono::seconds(20)});
  }
  // Called on rank 0, before it begins this step.
  std::function<void(int64_t)> before_step;
  bool replaces = true;
  JobHook hook = JobHook::kNone;
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
  // Does what `chorale resize` does.
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
                                    .sharded = sharded_,
                                    .hook = hook});
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

// Each of these phases has a death in it, of rank 0 and of rank 2. The phases of a change of ranks come only when there
// is one: after the death of another rank, dies_before(rank).
template <class DiesBefore>
void expect_deaths_survived(int ranks, std::initializer_list<const char*> phases, const DiesBefore& dies_before,
                            const std::optional<ShardedJob>& sharded = {}) {
  constexpr int64_t kSteps = 5;
  for (const std::string phase : phases) {
    for (const int rank : {0, 2}) {
      SCOPED_TRACE(concat("rank ", rank, " in ", phase));
      std::vector<Kill> kills{{rank, phase == "finish" ? kSteps : 2, phase}};
      if (phase == "agreement" || phase == "meeting" || phase == "transfer")
        kills.push_back({dies_before(rank), 2, "backward"});
      Threads job(ranks, kSteps, kills, sharded);
      job.replaces = false;
      const auto results = job.run();
      EXPECT_EQ(results.size(), static_cast<size_t>(ranks) - kills.size());
      expect_all_alike(results, kSteps);
      // Survivors keep their order.
      int rank_now = 0;
      for (const auto& [member, result] : results) EXPECT_EQ(result.last_rank, rank_now++);
    }
  }
}

// Mappings of memory that processes share.
inline int64_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(" rw-s ") != std::string::npos ? 1 : 0;
  return count;
}

inline int64_t entries_of(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// A new epoch, of the same ranks, in every step.
inline void expect_epochs_to_leave_nothing(const std::optional<ShardedJob>& sharded) {
  const int64_t steps = soaking() ? 1000 : 60;
  const auto store = std::make_shared<transport::MemoryStore>();
  const auto board = transport::EpochBoard::create();
  const auto state = [&](int64_t number) {
    store->set(transport::epoch_key(number), transport::Epoch{number, {0, 1}, "again"}.text(),
               within(std::chrono::seconds(5)));
    board->announce(number);
  };
  state(1);
  struct Counts {
    int64_t files = 0, threads = 0, entries = 0, shared = 0, bytes = 0;
  } early, late;
  const auto count = [&] {
    return Counts{entries_of("/proc/self/fd"), entries_of("/proc/self/task"),
                  store->count(within(std::chrono::seconds(5))), shared_mappings(),
                  static_cast<int64_t>(mallinfo2().uordblks)};
  };
  std::vector<std::thread> ranks;
  ranks.reserve(2);
  for (int member = 0; member < 2; ++member) {
    ranks.emplace_back([&, member] {
      const JobResult result = run_job({.seat = {store, board, member},
                                        .steps = steps,
                                        .ranks = 2,
                                        .die = [] {},
                                        .before_step =
                                            [&](int64_t step) {
                                              if (step == 20) early = count();
                                              if (step == steps - 1) late = count();
                                              state(step + 2);
                                            },
                                        .sharded = sharded});
      EXPECT_EQ(std::ssize(result.changes), steps + 1);
      expect_undisturbed(result, steps, false);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(late.threads, early.threads);
  // A rank may be about to let go of the epoch before: its segment, and what it has at the store.
  EXPECT_LE(late.files, early.files + 8);
  EXPECT_LE(late.shared, early.shared + 8);
  // The result itself has some numbers of each step, and the store an entry of each epoch.
  EXPECT_LE(late.bytes, early.bytes + (int64_t{1} << 20) + steps * 2048);
  std::cout << concat("from step 20 to ", steps - 1, ": descriptors ", early.files, " to ", late.files, ", threads ",
                      early.threads, " to ", late.threads, ", shared mappings ", early.shared, " to ", late.shared,
                      ", bytes in use ", early.bytes, " to ", late.bytes, "\n");
  EXPECT_LE(late.entries, early.entries + 16 + steps);  // one says who was in each epoch
}

}  // namespace chorale::elastic
