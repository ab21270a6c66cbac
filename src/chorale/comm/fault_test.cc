// Never a hang, never a wrong sum: every way to go wrong, in every collective, ends on every other rank with an error
// that names the culprit, in time. A cell of the matrix is one fault, one call, one number of ranks, threads or
// processes. CHORALE_FAULTS=all runs the numbers of ranks and calls that the default leaves out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/module.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/shm_engine.h"
#include "chorale/transport/file_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::HasSubstr;

enum class Fault { kNone, kShape, kDtype, kReduction, kRoot, kOtherCall, kException, kKill, kStop, kExit };
const char* name_of(Fault fault) {
  constexpr const char* kNames[] = {"none",       "wrong shape", "wrong dtype", "wrong reduction", "wrong root",
                                    "other call", "exception",   "SIGKILL",     "SIGSTOP",         "exit 0"};
  return kNames[static_cast<size_t>(fault)];
}

const CallKind kKinds[] = {CallKind::kBarrier,   CallKind::kBroadcast, CallKind::kReduce,  CallKind::kAllReduce,
                           CallKind::kAllGather, CallKind::kGather,    CallKind::kScatter, CallKind::kReduceScatter,
                           CallKind::kAllToAll,  CallKind::kSend};

bool has_root(CallKind kind) {
  return kind == CallKind::kBroadcast || kind == CallKind::kReduce || kind == CallKind::kGather ||
         kind == CallKind::kScatter;
}
bool reduces(CallKind kind) {
  return kind == CallKind::kReduce || kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
}
// Some calls have no shape, no root, or nothing to reduce; messages between two others do not see a fault.
bool exists(Fault fault, CallKind kind) {
  if (kind == CallKind::kBarrier) return fault == Fault::kNone || fault >= Fault::kOtherCall;
  if (kind == CallKind::kSend) return fault != Fault::kRoot && fault != Fault::kReduction && fault != Fault::kOtherCall;
  if (fault == Fault::kRoot) return has_root(kind);
  if (fault == Fault::kReduction) return reduces(kind);
  return true;
}

// The promise is 1 s; a machine that runs other tests at the same time gets some slack.
constexpr auto kInTime = 5s;

// One call, as the others expect it or with a fault in it. Messages go round in a ring.
void call(Group& group, CallKind kind, Fault fault, int64_t count) {
  const int size = group.size(), rank = group.rank();
  const int64_t n = count + (fault == Fault::kShape ? 1 : 0);
  const DType dtype = fault == Fault::kDtype ? DType::kI32 : DType::kF32;
  const int root = group.global_rank(fault == Fault::kRoot ? 1 : 0);
  const Reduce reduce = fault == Fault::kReduction ? Reduce::kMax : Reduce::kSum;
  const auto tensor = [&](int64_t elems) {
    return Tensor::from(std::vector<float>(static_cast<size_t>(elems), 1), {elems});
  };
  const auto typed = [&](int64_t elems) {
    return dtype == DType::kF32 ? tensor(elems) : Tensor::empty({elems}, dtype);
  };
  const auto list = [&] {
    std::vector<Tensor> tensors(static_cast<size_t>(size));
    for (Tensor& one : tensors) one = typed(n);
    return tensors;
  };
  const bool is_root = group.global_rank(rank) == root;
  if (fault == Fault::kOtherCall) kind = kind == CallKind::kBarrier ? CallKind::kAllReduce : CallKind::kBarrier;
  switch (kind) {
    case CallKind::kBarrier:
      return group.barrier().wait();
    case CallKind::kBroadcast:
      return group.broadcast(typed(n), root).wait();
    case CallKind::kReduce:
      return group.reduce(typed(n), root, reduce).wait();
    case CallKind::kAllReduce:
      return group.all_reduce(typed(n), reduce).wait();
    case CallKind::kAllGather:
      return group.all_gather_into(typed(n * size), typed(n)).wait();
    case CallKind::kGather:
      return group.gather(is_root ? list() : std::vector<Tensor>(), typed(n), root).wait();
    case CallKind::kScatter:
      return group.scatter(typed(n), is_root ? list() : std::vector<Tensor>(), root).wait();
    case CallKind::kReduceScatter:
      return group.reduce_scatter_from(typed(n), typed(n * size), reduce).wait();
    case CallKind::kAllToAll:
      return group.all_to_all(list(), list()).wait();
    default: {
      const int right = group.global_rank((rank + 1) % size), left = group.global_rank((rank + size - 1) % size);
      const Work sent = group.isend(typed(n), right), received = group.irecv(typed(n), left);
      sent.wait();
      received.wait();
    }
  }
}

void expect_error(Group& group, CallKind kind, Fault fault, int64_t count, int culprit, Clock::duration limit) {
  const auto start = Clock::now();
  try {
    call(group, kind, Fault::kNone, count);
    // A rank that exchanges messages with others only may be done before it hears of the fault; the next call tells.
    if (kind == CallKind::kSend) group.barrier().wait();
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_TRUE(group.is_broken());
    const bool differs = fault >= Fault::kShape && fault <= Fault::kOtherCall;
    // Of two that made different calls, or of the two ends of a message, either may be the one who is wrong.
    const bool pairwise = kind == CallKind::kSend || (kind == CallKind::kAllToAll && fault == Fault::kShape);
    if (!differs || (group.size() > 2 && !pairwise)) {
      EXPECT_EQ(error.failure().peer, culprit) << error.what();
    }
    EXPECT_THAT(error.what(), HasSubstr(concat("rank ", culprit)));
  }
  EXPECT_LT(Clock::now() - start, limit);
  // Later calls say so too, at once.
  EXPECT_THROW(group.barrier(), CommError);
}

// Faults that leave all ranks alive, each in a group of its own.
void run_live_cells(Group& world, const std::vector<int64_t>& counts) {
  const int culprit = world.size() - 1;
  for (CallKind kind : kKinds) {
    for (Fault fault :
         {Fault::kShape, Fault::kDtype, Fault::kReduction, Fault::kRoot, Fault::kOtherCall, Fault::kException}) {
      if (!exists(fault, kind)) continue;
      for (int64_t count : counts) {
        SCOPED_TRACE(concat(world.size(), " ranks, ", comm::name_of(kind), " of ", count, ", ", name_of(fault)));
        Group group = world.duplicate({.timeout = 10s});
        call(group, kind, Fault::kNone, count);
        group.barrier().wait();
        if (world.rank() != culprit) {
          expect_error(group, kind, fault, count, culprit, kInTime);
        } else if (fault == Fault::kException) {
          try {
            Group own = std::move(group);
            throw std::runtime_error("a rank fails");
          } catch (const std::runtime_error&) {
          }
        } else {
          EXPECT_THROW(
              {
                call(group, kind, fault, count);
                group.barrier().wait();
              },
              CommError);
        }
        world.barrier().wait();
      }
    }
  }
}

class FaultMatrix : public testing::Test {
 protected:
  static bool all() { return config::env("CHORALE_FAULTS") == "all"; }
};

TEST_F(FaultMatrix, ThreadsThatCallSomethingElseOrThrow) {
  for (int size : {2, 3, 5}) run_ranks(size, [&](Group& world) { run_live_cells(world, {7, 50'000}); });
}

TEST_F(FaultMatrix, ProcessesThatCallSomethingElseOrThrow) {
  for (int size : {2, 3}) {
    EXPECT_EQ(run_processes(size,
                            [&](Group& world) {
                              run_live_cells(world, {7, 50'000});
                            }),
              std::vector<int>(static_cast<size_t>(size), 0));
  }
}

TEST_F(FaultMatrix, RanksOnSeveralHostsThatCallSomethingElseOrThrow) {
  const std::vector<std::vector<int>> layouts = {{0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 0, 1, 2}};
  for (const auto& hosts : layouts) {
    if (hosts.size() > 3 && !all()) continue;
    run_hosts(hosts, [&](Group& world) { run_live_cells(world, {7, 50'000}); });
  }
}

TEST_F(FaultMatrix, RanksConnectedByUcxThatCallSomethingElseOrThrow) {
  if (const Availability ucx = module_availability(kUcxModule); !ucx.yes) GTEST_SKIP() << ucx.reason;
  run_hosts({0, 1}, [&](Group& world) { run_live_cells(world, {7, 50'000}); }, {.fabric = "ucx"});
}

// The last rank dies or stops when the others enter the call.
void run_deadly_cell(int size, CallKind kind, Fault fault) {
  SCOPED_TRACE(concat(size, " ranks, ", comm::name_of(kind), ", ", name_of(fault)));
  const int culprit = size - 1;
  const auto body = [&](Group& group) {
    call(group, kind, Fault::kNone, 1000);
    group.barrier().wait();
    if (group.rank() != culprit) return expect_error(group, kind, fault, 1000, culprit, kInTime);
    if (fault == Fault::kKill) raise(SIGKILL);
    if (fault == Fault::kStop) raise(SIGSTOP);
    _exit(0);
  };
  const auto end_the_stopped = [&](const RunningRanks& ranks) {
    siginfo_t info;
    for (int rank = 0; rank < culprit; ++rank)
      waitid(P_PID, static_cast<id_t>(ranks.pids[static_cast<size_t>(rank)]), &info, WEXITED | WNOWAIT);
    kill(ranks.pids.back(), SIGKILL);
  };
  const auto results = run_processes(size, body, {.timeout = 1500ms}, end_the_stopped);
  for (int rank = 0; rank < culprit; ++rank) EXPECT_EQ(results[static_cast<size_t>(rank)], 0) << "rank " << rank;
}

TEST_F(FaultMatrix, ProcessesThatAreKilled) {
  for (CallKind kind : kKinds) run_deadly_cell(3, kind, Fault::kKill);
  if (all()) {
    for (int size : {2, 5}) {
      for (CallKind kind : kKinds) run_deadly_cell(size, kind, Fault::kKill);
    }
  }
}
TEST_F(FaultMatrix, ProcessesThatExit) {
  for (CallKind kind : kKinds) run_deadly_cell(2, kind, Fault::kExit);
}
TEST_F(FaultMatrix, ProcessesThatAreStopped) {
  for (CallKind kind : {CallKind::kAllReduce, CallKind::kBroadcast, CallKind::kBarrier, CallKind::kSend})
    run_deadly_cell(3, kind, Fault::kStop);
  if (all()) {
    for (CallKind kind : kKinds) run_deadly_cell(5, kind, Fault::kStop);
  }
}

const std::atomic<uint32_t>* watched_hands = nullptr;
void stop_with_hands_up(int) {
  if (watched_hands->load() == 0) return;
  const itimerval never{};
  setitimer(ITIMER_VIRTUAL, &never, nullptr);
  kill(getpid(), SIGSTOP);
}

void reduce_until_it_fails(Group& group, const Tensor& x) {
  for (int i = 0; i < 200; ++i) group.all_reduce(x).wait();
}

// A peer is stopped while it stores into our tensor, and wakes long after we have given up on it.
TEST_F(FaultMatrix, AStoppedPeerThatWakesDoesNotWriteIntoWhatASurvivorHasTakenBack) {
  constexpr int64_t kElems = int64_t{16} << 20;
  const auto body = [&](Group& group) {
    int64_t pids[2] = {};
    const int64_t own = getpid();
    group.all_gather_into(std::span<int64_t>(pids), std::span<const int64_t>(&own, 1)).wait();
    const Tensor x = Tensor::empty({kElems}, DType::kF32);
    std::fill_n(x.data<float>(), kElems, 1.0f);
    group.all_reduce(x).wait();
    ASSERT_EQ(x.data<float>()[kElems - 1], 2.0f);
    group.barrier().wait();
    if (group.rank() == 1) {
      // By a clock of the time that this process computes, so that it happens however busy the machine is.
      watched_hands = &static_cast<const ShmEngine&>(*group.engine()).group().own().hands;
      signal(SIGVTALRM, stop_with_hands_up);
      const itimerval every_ms{{0, 1000}, {0, 1000}};
      setitimer(ITIMER_VIRTUAL, &every_ms, nullptr);
      EXPECT_THROW(reduce_until_it_fails(group, x), CommError);
      return;
    }
    try {
      reduce_until_it_fails(group, x);
      FAIL() << "the peer was not stopped in the middle";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1);
      EXPECT_THAT(error.what(), HasSubstr("stopped by a signal"));
    }
    std::fill_n(x.data<float>(), kElems, -7.0f);
    const auto peer = shm::PeerProcess::find(static_cast<const ShmEngine&>(*group.engine()).group().process_of(1));
    kill(static_cast<pid_t>(pids[1]), SIGCONT);
    while (peer->alive()) std::this_thread::sleep_for(1ms);
    for (int64_t i = 0; i < kElems; ++i) ASSERT_EQ(x.data<float>()[i], -7.0f) << i;
  };
  EXPECT_EQ(run_processes(2, body, {.timeout = 2s}), (std::vector<int>{0, 0}));
}

TEST_F(FaultMatrix, SurvivorsBuildANewGroup) {
  const auto body = [&](Group& group) {
    if (group.rank() == 1) raise(SIGKILL);
    EXPECT_THROW(group.barrier().wait(), CommError);
    transport::FileStore store(*config::env("CHORALE_TEST_STORE"));
    Group after = Group::connect(store, "after", group.rank() / 2, 2, {.timeout = 5s});
    std::vector<float> x(100'000, 1);
    after.all_reduce(std::span(x)).wait();
    EXPECT_EQ(x, std::vector<float>(100'000, 2));
  };
  EXPECT_EQ(run_processes(3, body, {.timeout = 5s}), (std::vector<int>{0, -SIGKILL, 0}));
}

TEST_F(FaultMatrix, ALateRankIsWaitedForUntilTheDeadline) {
  run_ranks(2, [&](Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(300ms);
    group.barrier({.tag = 0, .timeout = 5s}).wait();  // slow, but in time
    if (group.rank() == 1) return;
    const auto start = Clock::now();
    const Work work = group.barrier({.tag = 0, .timeout = 200ms});
    EXPECT_THROW(work.wait(), CommError);
    // Rank 1 left, which is an error at once; nobody need wait for the deadline.
    EXPECT_LT(Clock::now() - start, 190ms);
  });
}

}  // namespace
}  // namespace chorale::comm
