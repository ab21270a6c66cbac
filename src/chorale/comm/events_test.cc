// What the trace shows of calls: of each exactly one event, whatever the call and whatever carries it (section 3 of the
// contract). Under mpirun the last test runs over MPI (tests/mpi_test.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/debug_level.h"
#include "chorale/base/shared_object.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/transport/fabric/fabric_name.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Shapes = std::vector<std::vector<int64_t>>;

// A call, what its event is called, and the shapes that this rank passes.
struct TracedCall {
  std::string name;
  Shapes shapes;
  std::function<void(const Group&)> run;
};

// Every collective that there is, in each of its forms, and messages. The root is rank 1.
std::vector<TracedCall> every_call(const Group& group) {
  const int64_t n = group.size();
  const int rank = group.rank(), next = (rank + 1) % group.size(), before = (rank + group.size() - 1) % group.size();
  const bool is_root = rank == 1;
  const auto x = [] { return filled<float>({2, 3}, 1); };
  const auto list = [n](const Shape& sizes) {
    std::vector<Tensor> tensors;
    for (int64_t r = 0; r < n; ++r) tensors.push_back(filled<float>(sizes, 1));
    return tensors;
  };
  const Shapes each(static_cast<size_t>(n), {2, 3});
  // Where parts differ, rank r gets and gives r + 1 rows.
  std::vector<int64_t> rows_by_rank, own_rows(static_cast<size_t>(n), rank + 1);
  for (int64_t r = 0; r < n; ++r) rows_by_rank.push_back(r + 1);
  const int64_t all_rows = n * (n + 1) / 2;
  // On the root of a scatter what it gets stands before what it gives.
  Shapes scattered{{2, 3}};
  if (is_root) scattered.insert(scattered.end(), each.begin(), each.end());
  // A message to the next rank, received from the one before by name or from anybody.
  const auto ring = [=](const Group& g, int source) {
    const Work received = g.irecv(x(), source), sent = g.isend(x(), next);
    received.wait();
    sent.wait();
  };
  return {
      {"barrier", {}, [](const Group& g) { g.barrier().wait(); }},
      {"monitored_barrier", {}, [](const Group& g) { g.monitored_barrier(30s); }},
      {"broadcast", {{2, 3}}, [=](const Group& g) { g.broadcast(x(), 1).wait(); }},
      {"reduce", {{2, 3}}, [=](const Group& g) { g.reduce(x(), 1).wait(); }},
      {"all_reduce", {{2, 3}}, [=](const Group& g) { g.all_reduce(x()).wait(); }},
      {"all_reduce",
       {{2, 2}},
       [](const Group& g) {
         g.all_reduce(filled<complex64>({2}, {1, 2})).wait();
       }},
      {"all_reduce",
       {{2, 3}, {4}},
       [=](const Group& g) {
         g.all_reduce_coalesced({x(), filled<int32_t>({4}, 1)}).wait();
       }},
      {"all_reduce",
       {{2, 3}, {4}},
       [=](const Group& g) {
         Coalescing scope(g);
         std::ignore = g.all_reduce(x());
         std::ignore = g.all_reduce(filled<float>({4}, 1));
         scope.end().wait();
       }},
      {"sparse_all_reduce",
       {{7, 3}},
       [=](const Group& g) {
         const Tensor rows = numbered<int64_t>({1, rank + 1}, [](int64_t i) { return i; });
         std::ignore = g.sparse_all_reduce(Tensor::sparse_coo(rows, filled<float>({rank + 1, 3}, 1), {7, 3}));
       }},
      {"all_gather",
       {{2, 3}},
       [=](const Group& g) {
         g.all_gather(list({2, 3}), x()).wait();
       }},
      {"all_gather",
       {{rank + 1, 3}},
       [=](const Group& g) {
         std::vector<Tensor> outputs;
         outputs.reserve(rows_by_rank.size());
         for (const int64_t rows : rows_by_rank) outputs.push_back(filled<float>({rows, 3}, 0));
         g.all_gather(outputs, filled<float>({rank + 1, 3}, 1)).wait();
       }},
      {"all_gather",
       {{2, 3}},
       [=](const Group& g) {
         g.all_gather_into(filled<float>({2 * n, 3}, 0), x()).wait();
       }},
      {"all_gather",
       {{2, 3}, {5}},
       [=](const Group& g) {
         g.all_gather_coalesced({list({2, 3}), list({5})}, {x(), filled<float>({5}, 1)}).wait();
       }},
      {"gather",
       {{2, 3}},
       [=](const Group& g) {
         g.gather(is_root ? list({2, 3}) : std::vector<Tensor>(), x(), 1).wait();
       }},
      {"scatter", scattered,
       [=](const Group& g) {
         g.scatter(x(), is_root ? list({2, 3}) : std::vector<Tensor>(), 1).wait();
       }},
      {"reduce_scatter", each,
       [=](const Group& g) {
         g.reduce_scatter(x(), list({2, 3})).wait();
       }},
      {"reduce_scatter",
       {{2 * n, 3}},
       [=](const Group& g) {
         g.reduce_scatter_from(x(), filled<float>({2 * n, 3}, 1)).wait();
       }},
      {"all_to_all", each,
       [=](const Group& g) {
         g.all_to_all(list({2, 3}), list({2, 3})).wait();
       }},
      {"all_to_all",
       {{n, 3}},
       [=](const Group& g) {
         g.all_to_all_single(filled<float>({n, 3}, 0), filled<float>({n, 3}, 1)).wait();
       }},
      {"all_to_all",
       {{all_rows, 3}},
       [=](const Group& g) {
         const Tensor output = filled<float>({n * (rank + 1), 3}, 0);
         g.all_to_all_single(output, filled<float>({all_rows, 3}, 1), own_rows, rows_by_rank).wait();
       }},
      {"recv", {{2, 3}}, [=](const Group& g) { ring(g, before); }},
      {"recvAnySource", {{2, 3}}, [=](const Group& g) { ring(g, kAnySource); }},
  };
}

// Starts and ends the trace of all ranks of this process, which are threads that all call it.
void trace_of_all(const Group& group, bool threads, const std::function<void()>& what) {
  group.barrier().wait();
  if (!threads || group.rank() == 0) what();
  group.barrier().wait();
}

// Those of the events that are calls of this rank.
std::vector<trace::Event> calls_of(const std::vector<trace::Event>& events, int rank) {
  std::vector<trace::Event> calls;
  for (const trace::Event& event : events) {
    if (event.kind == trace::Kind::kCall && event.rank == rank) calls.push_back(event);
  }
  return calls;
}

// What a call of a rank left: the rank, the number of the call, and the events.
void expect_one_event(const TracedCall& call, const std::string& backend, const std::vector<trace::Event>& events) {
  std::vector<trace::Event> found = events;
  if (call.name.starts_with("recv")) {  // a message has two ends
    const auto send =
        std::find_if(found.begin(), found.end(), [&](const auto& event) { return event.name == backend + ":send"; });
    ASSERT_NE(send, found.end());
    EXPECT_EQ(send->shapes, call.shapes);
    EXPECT_TRUE(send->async);
    found.erase(send);
  }
  ASSERT_EQ(found.size(), 1u) << call.name << " over " << backend << " has " << found.size() << " events";
  EXPECT_EQ(found[0].name, concat(backend, ":", call.name));
  EXPECT_TRUE(found[0].async) << call.name;
  EXPECT_GE(found[0].end, found[0].start) << call.name;
  EXPECT_EQ(found[0].shapes, call.shapes) << call.name << " over " << backend;
}

// Each call is made by itself, between barriers that are not traced; rank 0 (or, where ranks are processes, each) looks
// at what it left.
void expect_one_event_per_call(Group& group, bool threads) {
  const std::vector<TracedCall> calls = every_call(group);
  const Group quiet = group.duplicate();
  static std::vector<trace::Event> events;  // of the last call, of all ranks that are threads
  for (const TracedCall& call : calls) {
    trace_of_all(quiet, threads, [] { trace::start(); });
    call.run(group);
    trace_of_all(quiet, threads, [] { events = trace::stop(); });
    // The barrier that ended before the trace was started, or goes on when it is stopped, is of the other group. Groups
    // that a call makes use of, as that of the ranks on this host, have names that begin with its group's.
    std::vector<trace::Event> own = calls_of(events, group.rank());
    std::erase_if(own, [&](const auto& event) { return event.traffic->group.starts_with(quiet.name()); });
    expect_one_event(call, group.backend(), own);
  }
  quiet.barrier().wait();
}

// spec: test_all_to_all_single_equal_split{,_complex,_group,_full_group}
TEST(Events, OneForEachCallAmongThreads) {
  run_ranks(3, [](Group& group) { expect_one_event_per_call(group, true); });
}

TEST(Events, OneForEachCallAmongProcesses) {
  EXPECT_EQ(run_processes(3, [](Group& group) { expect_one_event_per_call(group, false); }),
            (std::vector<int>{0, 0, 0}));
}

// Parts of such a call run on each host and between hosts: they are no calls of their own.
TEST(Events, OneForEachCallBetweenHosts) {
  for (const auto& hosts : {std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 2}}) {
    run_hosts(hosts, [](Group& group) {
      EXPECT_EQ(group.backend(), transport::choose_fabric("").kind);
      expect_one_event_per_call(group, true);
    });
  }
}

TEST(Events, OneForEachCallBetweenHostsOverUcx) {
  if (const Availability ucx = shared_object_availability(kUcxObject); !ucx.yes) GTEST_SKIP() << ucx.reason;
  run_hosts({0, 0, 1},
            [](Group& group) {
              EXPECT_EQ(group.backend(), "ucx");
              expect_one_event_per_call(group, true);
            },
            {.fabric = "ucx"});
}

// Each rank is a process of mpirun.
TEST(RankOfMpirunEvents, DISABLED_OneForEachCall) {
  run_ranks(3, [](Group& group) {
    EXPECT_EQ(group.backend(), "mpi");
    expect_one_event_per_call(group, false);
  });
}

// With checks before each collective there are more.
TEST(Events, InDetailTheChecksAreThereToo) {
  set_debug_level(DebugLevel::kDetail);
  const auto events = traced(2, [](Group& group) { group.all_reduce(cube(2, 1)).wait(); });
  set_debug_level(DebugLevel::kOff);
  for (int rank : {0, 1}) {
    EXPECT_EQ(count_events(events, "shm:all_reduce", rank), 1);
    EXPECT_EQ(count_events(events, "shm:monitored_barrier", rank), 1);
  }
}

}  // namespace
}  // namespace chorale::comm
