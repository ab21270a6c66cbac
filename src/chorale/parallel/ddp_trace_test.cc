// What the trace shows of data-parallel training.
#include <nlohmann/json.hpp>

#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/trace/trace_summary.h"

namespace chorale::parallel {
namespace {

constexpr int kRanks = 2;

// Events of `count` steps, with the trace on from step `from` to the end.
std::vector<trace::Event> traced_steps(FindUnused search, int count, int from) {
  run_ranks(kRanks, [=](comm::Group& group) {
    DistributedDataParallel ddp(Linear(10, 10, {.bias = false}), group, {.find_unused_parameters = search});
    optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.01});
    for (int step = 0; step < count; ++step) {
      if (step == from) {
        group.barrier().wait();
        if (group.rank() == 0) trace::start();
        group.barrier().wait();
      }
      optimizer.zero_grad();
      backward(mean(ddp(pattern({3, 10}, step))));
      optimizer.step();
    }
  });
  return trace::stop();
}

std::vector<trace::Event> named(const std::vector<trace::Event>& events, const std::string& name, int rank) {
  std::vector<trace::Event> found;
  for (const trace::Event& event : events) {
    if (event.name == name && event.rank == rank) found.push_back(event);
  }
  return found;
}

// spec: test_ddp_profiling_autograd_profiler, test_ddp_profiling_torch_profiler
TEST(DdpTrace, ShowsEveryReductionAndTheSearchAlsoWhenTurnedOnLate) {
  const auto first = traced_steps(FindUnused::kOff, 6, 0);
  const auto late = traced_steps(FindUnused::kOn, 4, 3);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto reductions = named(first, "shm:all_reduce", rank);
    ASSERT_EQ(reductions.size(), 6u);
    for (const trace::Event& event : reductions) {
      EXPECT_TRUE(event.async);
      EXPECT_LE(event.start, event.end);
      ASSERT_TRUE(event.traffic);
      EXPECT_EQ(event.traffic->call, "all_reduce");
      EXPECT_EQ(event.traffic->dtype, "f32");
      EXPECT_FALSE(event.traffic->group.empty());
      EXPECT_EQ(event.traffic->ranks, (std::vector<int>{0, 1}));
      EXPECT_EQ(event.traffic->in_elems, std::vector<int64_t>{100});
      EXPECT_EQ(event.traffic->out_elems, std::vector<int64_t>{100});
    }
    EXPECT_GE(named(first, "shm:broadcast", rank).size(), 1u);  // the new buckets
    EXPECT_EQ(named(first, "search_unused_parameters", rank).size(), 0u);

    EXPECT_EQ(named(late, "shm:all_reduce", rank).size(), 2u);  // the bucket and the used map
    EXPECT_EQ(named(late, "search_unused_parameters", rank).size(), 1u);
  }
}

// spec: test_ddp_profiling_execution_trace
TEST(DdpTrace, ListsTheCallsOfARankWithTheirGroups) {
  const auto events = traced_steps(FindUnused::kOn, 4, 3);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto trace = nlohmann::json::parse(trace::execution_json(events, rank));
    EXPECT_EQ(trace["rank"], rank);
    std::vector<nlohmann::json> groups, calls;
    for (const auto& node : trace["nodes"]) {
      if (node["name"] == "process_group:init") {
        groups.push_back(node);
      } else if (node.value("pg_name", "") != "world") {  // the barriers of this test are in the world
        calls.push_back(node);
      }
    }
    std::erase_if(calls, [](const auto& node) { return node["dtype"] == "u8"; });
    EXPECT_GE(groups.size(), 1u);
    ASSERT_EQ(calls.size(), 3u) << trace.dump(1);
    const auto expect_reduction = [&](const nlohmann::json& node, const char* dtype, int64_t elems) {
      EXPECT_EQ(node["collective_name"], "all_reduce");
      EXPECT_EQ(node["dtype"], dtype);
      EXPECT_TRUE(node["pg_name"].is_string() && node["pg_desc"].is_string());
      EXPECT_EQ(node["pg_size"], kRanks);
      EXPECT_EQ(node["in_msg_nelems"], elems);
      EXPECT_EQ(node["out_msg_nelems"], elems);
      EXPECT_TRUE(node["in_split_size"].empty() && node["out_split_size"].empty());
      EXPECT_EQ(node["global_rank_start"], 0);
      EXPECT_EQ(node["global_rank_stride"], 1);
    };
    expect_reduction(calls[0], "f32", 100);
    expect_reduction(calls[1], "i32", 1);
    EXPECT_EQ(calls[2]["collective_name"], "wait");
    EXPECT_EQ(calls[2]["dtype"], "f32");
  }
}

TEST(DdpTrace, ShowsWhereTheTimeOfEachStepGoes) {
  constexpr int kSteps = 5;
  trace::start();
  run_ranks(kRanks, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), 1), group, {.bucket_cap_mb = 0.001});
    optim::Sgd optimizer(ddp.managed_parameters(), {.lr = 0.01});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      backward(mean(ddp(pattern({3, 2}, step))));
      optimizer.step();
    }
  });
  const std::vector<trace::StepTimes> steps = trace::step_times(trace::stop());
  ASSERT_EQ(steps.size(), static_cast<size_t>(kRanks * kSteps));
  for (const trace::StepTimes& step : steps) {
    EXPECT_GT(step.forward.count(), 0);
    EXPECT_GT(step.backward.count(), 0);
    EXPECT_GT(step.optimizer.count(), 0);
    EXPECT_GT(step.compute.count(), 0);
    EXPECT_GT(step.exposed.count(), 0);
    EXPECT_LE(step.exposed, step.communication);
    // One for all at first, two when they were made anew: [2, 1] and [0].
    ASSERT_EQ(step.buckets.size(), step.step == 0 ? 1u : 2u);
    EXPECT_EQ(step.buckets[0].first, "bucket 0");
    for (const auto& [name, time] : step.buckets) EXPECT_GT(time.count(), 0) << name;
  }
}

}  // namespace
}  // namespace chorale::parallel
