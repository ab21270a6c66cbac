#include "chorale/elastic/elastic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <latch>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/elastic/batches.h"
#include "chorale/elastic/job_test_util.h"
#include "chorale/elastic/thread_job_test_util.h"
#include "chorale/launch/epochs.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::elastic {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// ---- batches

// A loader takes them in pieces; none is larger than at the start, and with fewer ranks there are more of them.
TEST(ElasticBatches, PiecesAreTheSameSamplesAndNotLarger) {
  const auto order = std::make_shared<data::RandomSampler>(50, 3);
  const Batches whole(order, 12);
  for (const int ranks : {1, 2, 3, 4, 5}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const Pieces pieces(order, {.batch = 12, .largest = 3, .rank = rank, .ranks = ranks, .first_ranks = 4});
      const data::Batches all = pieces.batches(1);
      ASSERT_EQ(std::ssize(all), pieces.size());
      ASSERT_EQ(pieces.size(), 4 * pieces.pieces_of_step());
      size_t at = 0;
      for (int64_t step = 0; step < 4; ++step) {
        std::vector<int64_t> joined;
        for (int64_t piece = 0; piece < pieces.pieces_of_step(); ++piece, ++at) {
          EXPECT_LE(all[at].size(), 3U);
          EXPECT_GE(all[at].size(), 1U);
          joined.insert(joined.end(), all[at].begin(), all[at].end());
        }
        EXPECT_EQ(joined, whole.of(4 + step, rank, ranks)) << "rank " << rank << " of " << ranks;
      }
    }
  }
}

TEST(ElasticBatches, ALocalBatchStaysThatOfTheStart) {
  const auto order = std::make_shared<data::SequentialSampler>(24);
  for (const int ranks : {1, 2, 3, 6}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const Pieces pieces(order,
                          {.batch = 12, .largest = 4, .rank = rank, .ranks = ranks, .local = true, .first_ranks = 3});
      EXPECT_EQ(pieces.samples_of_step(), 4);
      const data::Batches all = pieces.batches(0);
      ASSERT_EQ(all.size(), 2U);
      EXPECT_EQ(all[1].front(), (12 + rank * 4) % 24);
    }
  }
}

TEST(ElasticBatches, AnyNumberOfRanksTakesEachSampleOfABatchOnce) {
  const Batches batches(std::make_shared<data::RandomSampler>(23, 7), 7);
  EXPECT_EQ(batches.steps_per_epoch(), 3);
  for (int64_t step = 0; step < 6; ++step) {
    const std::vector<int64_t> whole = batches.of(step, 0, 1);
    EXPECT_EQ(std::set(whole.begin(), whole.end()).size(), 7);
    for (int ranks = 1; ranks <= 7; ++ranks) {
      std::vector<int64_t> all;
      double weights = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int64_t> part = batches.of(step, rank, ranks);
        EXPECT_EQ(std::ssize(part), (rank + 1) * 7 / ranks - rank * 7 / ranks);
        EXPECT_EQ(batches.weight(rank, ranks), static_cast<double>(ranks * std::ssize(part)) / 7);
        all.insert(all.end(), part.begin(), part.end());
        weights += batches.weight(rank, ranks);
      }
      EXPECT_EQ(all, whole);
      EXPECT_NEAR(weights, ranks, 1e-12);
    }
  }
  EXPECT_THAT(message_of([&] { batches.of(0, 0, 8); }), HasSubstr("too small for 8 ranks"));
}

// ---- a job of threads

TEST(Elastic, WithoutDeathsAJobIsThatOfOneRank) {
  Threads job(3, 6, {});
  const auto results = job.run();
  EXPECT_EQ(results.size(), 3);
  expect_all_alike(results, 6);
  for (const auto& [member, result] : results) {
    EXPECT_EQ(result.last_rank, member);
    EXPECT_EQ(result.changes.size(), 1);
    EXPECT_EQ(result.sizes, std::vector<int>(6, 3));
  }
}

TEST(Elastic, ADeathInAnyPhaseIsSurvived) {
  expect_deaths_survived(3,
                         {"begin", "forward", "backward", "bucket", "commit", "update", "applied", "agreement",
                          "meeting", "transfer", "finish"},
                         [](int) { return 1; });
}

TEST(Elastic, AReplacementGetsTheStateAndTakesPart) {
  Threads job(3, 40, {{1, 3, "backward"}});
  // The job waits for the replacement before its last steps, so that there are some with it.
  job.before_step = [&](int64_t step) {
    if (step != 30) return;
    const Deadline patience = within(20s);
    while (job.latest().rank_of(3) < 0 && !patience.passed()) std::this_thread::sleep_for(1ms);
  };
  const auto results = job.run();
  expect_all_alike(results, 40);
  ASSERT_TRUE(results.contains(3));
  const JobResult& newcomer = results.at(3);
  EXPECT_EQ(newcomer.last_rank, 2);  // survivors first
  EXPECT_EQ(results.at(2).last_rank, 1);
  EXPECT_EQ(newcomer.sizes.front(), 3);
  EXPECT_EQ(newcomer.sizes.back(), 3);
}

TEST(Elastic, TheSameHistoryOfRanksGivesTheSameBits) {
  std::vector<JobResult> runs;
  for (int i = 0; i < 2; ++i) {
    Threads job(4, 6, {{0, 2, "forward"}, {1, 3, "backward"}});
    job.replaces = false;
    const auto results = job.run();
    EXPECT_EQ(results.size(), 2);
    expect_all_alike(results, 6);
    runs.push_back(results.begin()->second);
  }
  EXPECT_EQ(runs[0].sizes, (std::vector<int>{4, 4, 3, 2, 2, 2}));
  EXPECT_EQ(runs[0].sizes, runs[1].sizes);
  EXPECT_EQ(runs[0].losses, runs[1].losses);
  EXPECT_EQ(runs[0].bits, runs[1].bits);
}

// ---- two ranks as threads in epochs that a test states itself

struct Pair {
  std::shared_ptr<transport::Store> store = std::make_shared<transport::MemoryStore>();
  std::shared_ptr<transport::EpochBoard> board = transport::EpochBoard::create();

  void state(int64_t number, std::vector<int> members) const {
    store->set(transport::epoch_key(number), transport::Epoch{number, std::move(members), "stated"}.text(), within(5s));
    board->announce(number);
  }
  static void run(int members, const std::function<void(int member)>& rank) {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(members));
    for (int member = 0; member < members; ++member) threads.emplace_back([&, member] { rank(member); });
    for (std::thread& thread : threads) thread.join();
  }
};

// Nobody has died, so nothing but Elastic ends them.
TEST(Elastic, GroupsOfBeforeThrowAlsoWhereRanksChangedOnDemand) {
  const Pair pair;
  pair.state(1, {0, 1});
  Pair::run(2, [&](int member) {
    std::vector<comm::Group> made;  // one in each epoch
    Elastic job({.rebuild = [&](const comm::Group& group) { made.push_back(group.duplicate()); },
                 .seat = Seat{pair.store, pair.board, member}});
    parallel::DistributedDataParallel<nn::Linear> model(nn::Linear(2, 2), job.group());
    optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
    job.keep(model, optimizer);
    job.run(4, [&](int64_t step) {
      made.back().barrier().wait();
      if (step == 1 && job.group().rank() == 0) pair.state(2, {1, 0});
      job.step();
      // A call that others are still in when the first one comes to the change.
      if (step == 1 && member == 1) std::this_thread::sleep_for(20ms);
      made.back().barrier().wait();
    });
    ASSERT_EQ(made.size(), 2U);
    EXPECT_EQ(made[1].rank(), 1 - member);
    std::vector<double> x{1};
    EXPECT_THAT(message_of<CommError>([&] { made[0].all_reduce(std::span(x)).wait(); }),
                HasSubstr("which Elastic::group() is now"));
  });
}

// Where a hook leaves gradients each rank's own, parameters differ: a newcomer gets all of them from one rank.
TEST(Elastic, ANewcomerGetsNoPatchworkOfRanksThatDiffer) {
  const Pair pair;
  pair.state(1, {0, 1});
  Pair::run(3, [&](int member) {
    Elastic job({.seat = Seat{pair.store, pair.board, member}});
    parallel::DistributedDataParallel<nn::Linear> model(nn::Linear(2, 2), job.group());
    model.register_comm_hook(parallel::noop_hook());
    optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
    job.keep(model, optimizer);
    job.run(4, [&](int64_t step) {
      if (step == 1 && job.group().rank() == 0) pair.state(2, {0, 1, 2});
      job.step([&] {
        if (step > 0) return;
        const NoGrad quiet;
        for (const Tensor& p : optimizer.parameters()) fill_(p, member + 1);
      });
      if (step < 2) return;
      for (const Tensor& p : optimizer.parameters()) {
        for (const float value : p.to_vector<float>()) EXPECT_EQ(value, member == 1 ? 2 : 1) << "of member " << member;
      }
    });
    EXPECT_EQ(job.steps_done(), 4);
  });
}

TEST(Elastic, EpochsLeaveNothingBehind) { expect_epochs_to_leave_nothing({}); }

TEST(Elastic, SeededSchedulesEndAsAJobWithoutDeaths) {
  const int schedules = seeds_to_try(12, 5000);
  for (int seed = 0; seed < schedules; ++seed) {
    const std::vector<Kill> kills = random_kills(static_cast<uint64_t>(seed), 4, 6);
    SCOPED_TRACE(concat("seed ", seed, ": ", text_of(kills)));
    Threads job(4, 6, kills);
    job.replaces = seed % 2 == 0;
    expect_all_alike(job.run(), 6);
    if (testing::Test::HasFailure()) break;
  }
}

// ---- what is refused

struct Alone {
  std::shared_ptr<transport::Store> store = std::make_shared<transport::MemoryStore>();
  std::shared_ptr<transport::EpochBoard> board = transport::EpochBoard::create();
  launch::Epochs epochs{{.limits = {1, 1}, .ranks = 1, .store = store, .board = board}};
  Elastic job{{.patience = 50ms, .seat = Seat{store, board, 0}}};
  parallel::DistributedDataParallel<nn::Linear> model{nn::Linear(2, 2), job.group()};
  optim::Sgd optimizer{model.named_parameters(), {.lr = 0.1}};
};

TEST(Elastic, WhatCannotBeTakenBackIsRefused) {
  Alone hook;
  hook.model.register_comm_hook(
      {"own", [](parallel::GradBucket& bucket) { return parallel::average(bucket.group(), bucket.buffer()); }});
  EXPECT_THAT(message_of<StateError>([&] { hook.job.keep(hook.model, hook.optimizer); }),
              HasSubstr("the hook own has no begin, commit and abort"));
  Alone batched;
  batched.model.register_comm_hook(parallel::batched_power_sgd_hook(std::make_shared<parallel::PowerSgd>()));
  EXPECT_THROW(batched.job.keep(batched.model, batched.optimizer), StateError);
  Alone elsewhere;
  elsewhere.model.register_comm_hook(parallel::bf16_compress_hook(&elsewhere.job.group()));
  EXPECT_THAT(message_of<StateError>([&] { elsewhere.job.keep(elsewhere.model, elsewhere.optimizer); }),
              HasSubstr("a group that does not change with the ranks"));
  Alone halved;
  halved.model.register_comm_hook(parallel::bf16_compress_hook());
  halved.job.keep(halved.model, halved.optimizer);
  Alone fused;
  fused.optimizer.update_in_backward();
  EXPECT_THAT(message_of<StateError>([&] { fused.job.keep(fused.model, fused.optimizer); }),
              HasSubstr("updates in backward"));
  Alone owned;
  owned.model.set_gradient_owners({0, 0});
  EXPECT_THAT(message_of<StateError>([&] { owned.job.keep(owned.model, owned.optimizer); }),
              HasSubstr("gradients with owners"));
  Alone nothing;
  EXPECT_THAT(message_of<StateError>([&] { nothing.job.run(1, [](int64_t) {}); }), HasSubstr("keep(model, optimizer)"));
  Alone idle;
  idle.job.keep(idle.model, idle.optimizer);
  EXPECT_THAT(message_of<StateError>([&] { idle.job.run(1, [](int64_t) {}); }), HasSubstr("did not call step()"));
  EXPECT_THAT(message_of<StateError>([&] { idle.job.step(); }), HasSubstr("belongs into the body"));
  EXPECT_THAT(message_of<StateError>([&] { idle.job.run(1, [](int64_t) {}); }),
              HasSubstr("an elastic job has one loop"));
}

// However patient the ranks are: the launcher states no epoch any more.
TEST(Elastic, WhenTheJobIsStoppedNobodyWaitsForAnotherEpoch) {
  Alone one;
  one.job.keep(one.model, one.optimizer);
  one.board->set_waiting(true);
  const auto fails = [&](int64_t) {
    one.board->stop();
    throw CommError("a rank is gone");
  };
  EXPECT_THAT(message_of<StateError>([&] { one.job.run(1, fails); }),
              testing::AllOf(HasSubstr("is being stopped"), HasSubstr("a rank is gone")));
}

TEST(Elastic, AFailureThatIsNoDeathIsThrown) {
  Alone one;
  one.job.keep(one.model, one.optimizer);
  EXPECT_THAT(
      message_of<StateError>([&] { one.job.run(1, [](int64_t) { throw CommError("a mistake of the program"); }); }),
      testing::AllOf(HasSubstr("stated no death"), HasSubstr("a mistake of the program")));
}

TEST(Elastic, AnExcludedRankEndsAndSaysSo) {
  Alone one;
  one.job.keep(one.model, one.optimizer);
  EXPECT_THAT(
      message_of<StateError>([&] {
        one.job.run(2, [&](int64_t) {
          one.store->set(transport::epoch_key(2), transport::Epoch{2, {7}, "it was stopped"}.text(), within(1s));
          one.board->announce(2);
          throw CommError("woken too late");
        });
      }),
      testing::AllOf(HasSubstr("excluded from epoch 2"), HasSubstr("it was stopped")));
}

// Ranks that are on different hosts, as far as they know.
TEST(Elastic, EachEpochHasASecretOfItsOwn) {
  const transport::Secret job = transport::Secret::from_bytes("the secret of this job");
  EXPECT_EQ(secret_of_epoch(job, 3).bytes(), secret_of_epoch(job, 3).bytes());
  EXPECT_NE(secret_of_epoch(job, 3).bytes(), secret_of_epoch(job, 4).bytes());
  EXPECT_NE(secret_of_epoch(job, 3).bytes(), job.bytes());
  // A rank of the epoch before is not let in.
  transport::MemoryStore store;
  std::vector<std::thread> ranks;
  ranks.reserve(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      comm::GroupOptions options;
      options.timeout = 2s;
      options.net = {
          .secret = secret_of_epoch(job, 4 - rank), .address = "127.0.0.1", .host = static_cast<uint64_t>(rank)};
      EXPECT_THROW(comm::Group::connect(store, "epochs", rank, 2, options), CommError);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// ---- a rank of `chorale run --elastic`, which tests/elastic_test.py and tests/elastic_nodes_test.py start

TEST(RankOfAnElasticJob, DISABLED_Trains) {
  const auto seat = Seat::from_environment();
  ASSERT_TRUE(seat) << "chorale run --elastic starts it";
  const int64_t steps = std::stoll(config::env("ELASTIC_STEPS").value_or("8"));
  // Rank 0 says that it has come to one of these steps, and goes on when the test lets it. In step 1 it may take long.
  const auto hold = [busy = std::stoll(config::env("ELASTIC_BUSY_S").value_or("0")),
                     steps = config::env("ELASTIC_HOLD").value_or(""),
                     folder = config::env("ELASTIC_FOLDER").value_or("")](int64_t step) {
    for (const Deadline end = within(std::chrono::seconds(step == 1 ? busy : 0)); !end.passed();) continue;
    std::istringstream words(steps);
    for (int64_t at = 0; words >> at;) {
      if (step != at) continue;
      std::ofstream(concat(folder, "/held_", step)) << "";
      for (const Deadline patience = within(60s);
           !std::filesystem::exists(concat(folder, "/go_", step)) && !patience.passed();)
        std::this_thread::sleep_for(1ms);
    }
  };
  std::optional<ShardedJob> sharded;
  if (const auto every = config::env("ELASTIC_COPY_EVERY"))
    sharded = ShardedJob{.options = {.copy_every = std::stoll(*every),
                                     .folder = config::env("ELASTIC_SAVED").value_or(""),
                                     .save_every = 1}};
  const JobResult result = run_job({.seat = *seat,
                                    .steps = steps,
                                    .ranks = 3,
                                    .kills = parse_kills(config::env("ELASTIC_KILLS").value_or("")),
                                    .die = [] { std::raise(SIGKILL); },
                                    .draws = true,
                                    .before_step = hold,
                                    .sharded = sharded,
                                    .keeps_losses = !config::env("ELASTIC_QUIET")});
  expect_undisturbed(result, steps, true);
  std::string sizes;
  for (const int size : result.sizes) sizes += concat(" ", size);
  std::cout << concat("member ", seat->member, " rank ", result.last_rank, " bits ", result.bits, " sizes", sizes, "\n")
            << std::flush;
}

}  // namespace
}  // namespace chorale::elastic
