// One rank of a cell of the fault matrix, or all of its ranks as threads. tests/fault_matrix starts these, many at
// once.
//
//   fault_rank --list                  the cells that exist, as FAULT CALL
//   fault_rank --columns               what can connect ranks here
//   fault_rank CELL threads            all ranks, as threads
//   fault_rank CELL mpi STORE          one rank that mpirun has started
//   fault_rank CELL RANK STORE [ADDRESS]
//                                      one rank; STORE is a file where they meet, ADDRESS where others reach this host
//                                      (127.0.0.1: ranks of odd numbers behave as if they were on a second host)
//
// Exits with 0 if the rank saw what it must see; says on standard output what it saw instead. Under mpirun, which hides
// the exit codes of ranks, it also says that all is well.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "cell.h"
#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/shared_object.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::faults {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using comm::Group;

// What is promised is 1 s after a death and the deadline for a stopped rank; a busy machine gets some slack.
constexpr auto kInTime = 4s;
constexpr int kMostCallsInALoop = 20'000;

struct Mistake : std::logic_error {
  using std::logic_error::logic_error;
};
struct OnPurpose : std::runtime_error {
  OnPurpose() : std::runtime_error("on purpose") {}
};

class Rank {
 public:
  Rank(const Cell& cell, int rank, std::string address)
      : cell_(cell), rank_(rank), address_(std::move(address)), is_culprit_(rank == cell.culprit()) {}

  void run(transport::Store& store) {
    Group world = Group::connect(store, "world", rank_, cell_.size, options());
    Group group = world.duplicate({.timeout = cell_.deadline()});
    std::mt19937_64 random(cell_.seed + 7);
    for (int step = 0; step < cell_.steps; ++step) {
      const auto rows = call_rows();
      const CallRow& row = rows[random() % rows.size()];
      const auto count = static_cast<int64_t>(1 + random() % 3000);
      make_call(row, world, count, static_cast<int>(random() % static_cast<uint64_t>(cell_.size)));
    }
    world.barrier().wait();
    started_ = Clock::now();
    if (is_culprit_) {
      be_the_culprit(std::move(group));
    } else {
      be_another(group);
    }
  }

 private:
  comm::GroupOptions options() const {
    comm::GroupOptions options{.timeout = 20s};
    const char* what = cell_.fault == Fault::kCut          ? "reset"
                       : cell_.fault == Fault::kDamage     ? "corrupt"
                       : cell_.fault == Fault::kDamageData ? "corrupt"
                                                           : nullptr;
    // The calls before the loop count too; whichever of them is the hundredth.
    if (what) {
      options.chaos = concat(what, "@rank=", cell_.culprit(), ",call=", 100 + cell_.seed % 50,
                             cell_.fault == Fault::kDamageData ? ",what=payload" : "");
    }
    options.checksum = cell_.fault == Fault::kDamageData;
    if (!address_.empty()) {
      options.net.secret = transport::Secret::from_bytes("of this test, and of no use elsewhere");
      options.net.address = address_;
      if (address_ == "127.0.0.1") options.net.host = static_cast<uint64_t>(Cell::host_of(rank_));
      if (cell_.column == "ucx") options.fabric = address_ == "127.0.0.1" ? "ucx:lo" : "ucx:veth0";
    }
    if (cell_.column == "mpi") options.fabric = "mpi";
    return options;
  }

  void call(Group& group, Wrong wrong = Wrong::kNothing) const {
    make_call(*cell_.call, group, cell_.count(), cell_.root(), wrong);
  }
  // Another call than that of the cell.
  void next_call(Group& group) const {
    make_call(call_row(std::string_view(cell_.call->name) == "barrier" ? "all_reduce" : "barrier"), group, 5, 0);
  }
  void calls(Group& group) {
    if (!cell_.in_a_loop()) {
      call(group);
      // A rank that exchanges messages with others only may be done before it hears of the fault; the next call tells.
      if (!cell_.ends_with_the_call()) next_call(group);
      return;
    }
    for (int i = 0; i < kMostCallsInALoop; ++i) {
      started_ = Clock::now();
      call(group);
    }
  }

  void be_the_culprit(Group group) {
    switch (cell_.fault) {
      case Fault::kKill:
        raise(SIGKILL);
        return;
      case Fault::kStop:
        raise(SIGSTOP);
        return expect_error(group, false, [&] { calls(group); });  // when it is woken
      case Fault::kKillSoon:
      case Fault::kStopSoon: {
        const int signal = cell_.fault == Fault::kKillSoon ? SIGKILL : SIGSTOP;
        const auto wait = std::chrono::microseconds(std::mt19937_64(cell_.seed + 3)() % 20'000);
        const std::jthread timer([&] {
          std::this_thread::sleep_for(wait);
          kill(getpid(), signal);
        });
        return expect_error(group, false, [&] { calls(group); });
      }
      case Fault::kExit:
        _exit(0);
      case Fault::kException:
        throw OnPurpose();
      case Fault::kShape:
      case Fault::kDtype:
      case Fault::kReduction:
      case Fault::kRoot:
        return expect_error(group, true, [&] {
          const int first = static_cast<int>(Fault::kShape) - static_cast<int>(Wrong::kShape);
          call(group, static_cast<Wrong>(static_cast<int>(cell_.fault) - first));
          if (!cell_.ends_with_the_call()) next_call(group);
        });
      case Fault::kSkip:
        return expect_error(group, true, [&] { next_call(group); });
      case Fault::kSlow:
        std::this_thread::sleep_for(150ms);
        return calls(group);
      case Fault::kCut:
      case Fault::kDamage:
      case Fault::kDamageData:
        return expect_error(group, true, [&] { calls(group); });
    }
  }

  void be_another(Group& group) {
    if (cell_.fault == Fault::kSlow) return calls(group);
    expect_error(group, true, [&] { calls(group); });
    if (Clock::now() - started_ > kInTime + cell_.deadline() % 10s) {
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_).count();
      throw Mistake(concat("the error took ", ms, " ms: ", error_));
    }
  }

  // `judged`: the error must blame the right one.
  template <class F>
  void expect_error(Group& group, bool judged, const F& calls_that_fail) {
    try {
      calls_that_fail();
    } catch (const CommError& error) {
      error_ = error.what();
      if (judged && !cell_.may_name(error.failure().peer))
        throw Mistake(concat("blames rank ", error.failure().peer, " instead of rank ", cell_.culprit(), ": ", error_));
      // A group that did not come to be has no calls, and is no loss to the one it was made from.
      if (std::string_view(cell_.call->name) == "new_group") return;
      if (error_.find("the last calls are in ") == std::string::npos)
        throw Mistake(concat("no record of the last calls: ", error_));
      if (!group.is_broken()) throw Mistake(concat("the group is not broken after: ", error_));
      return expect_broken(group);
    }
    throw Mistake("no error");
  }
  void expect_broken(Group& group) const {
    const auto start = Clock::now();
    try {
      std::ignore = group.barrier();
    } catch (const CommError&) {
      if (Clock::now() - start > 500ms) throw Mistake("a broken group takes its time to say so");
      return;
    }
    throw Mistake("a broken group takes calls");
  }

  const Cell& cell_;
  const int rank_;
  const std::string address_;
  const bool is_culprit_;
  Clock::time_point started_;
  std::string error_;
};

// What is wrong; empty: nothing.
std::string run_rank(const Cell& cell, int rank, transport::Store& store, const std::string& address = {}) {
  try {
    Rank(cell, rank, address).run(store);
  } catch (const OnPurpose&) {
    return {};
  } catch (const std::exception& error) {
    return concat("rank ", rank, ": ", error.what(), "\n");
  }
  return {};
}

std::string run_threads(const Cell& cell) {
  transport::MemoryStore store;
  std::mutex mutex;
  std::string wrong;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < cell.size; ++rank) {
    threads.emplace_back([&, rank] {
      set_thread_count(1);
      const std::string text = run_rank(cell, rank, store);
      const std::lock_guard lock(mutex);
      wrong += text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

// Mpirun ends all ranks when one ends with something in flight: each waits until the others have seen what they see.
void run_rank_of_mpirun(const Cell& cell, transport::Store& store) {
  const int rank = std::stoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const std::string wrong = run_rank(cell, rank, store);
  std::cout << (wrong.empty() ? concat("rank ", rank, " saw what it must see\n") : wrong) << std::flush;
  store.set(concat("seen by ", rank), "", within(10s));
  const bool culprit_stopped = cell.fault == Fault::kStop || cell.fault == Fault::kStopSoon;
  for (int peer = 0; peer < cell.size; ++peer) {
    if (!culprit_stopped || peer != cell.culprit()) store.get(concat("seen by ", peer), within(10s));
  }
  if (culprit_stopped) _exit(0);  // MPI would wait for it
}

}  // namespace
}  // namespace chorale::faults

int main(int argc, char** argv) {
  using namespace chorale;
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 1 && words[0] == "--list") {
    for (const std::string& cell : faults::existing_cells()) std::cout << cell << '\n';
    return 0;
  }
  if (words.size() == 1 && words[0] == "--columns") {
    std::cout << "threads\nshm\ntls\n";
    if (shared_object_availability(kUcxObject).yes) std::cout << "ucx\n";
    if (shared_object_availability(kMpiObject).yes) std::cout << "mpi\n";
    return 0;
  }
  try {
    CHORALE_CHECK(words.size() >= 2, "see the top of tests/faults/main.cc");
    const faults::Cell cell = faults::Cell::parse(words[0]);
    std::string wrong;
    if (words[1] == "threads") {
      wrong = faults::run_threads(cell);
    } else if (words[1] == "mpi") {
      CHORALE_CHECK(words.size() == 3, "a rank meets the others at a file");
      transport::FileStore store(words[2]);
      faults::run_rank_of_mpirun(cell, store);
    } else {
      CHORALE_CHECK(words.size() >= 3, "a rank meets the others at a file");
      transport::FileStore store(words[2]);
      wrong = faults::run_rank(cell, std::stoi(words[1]), store, words.size() > 3 ? words[3] : "");
    }
    std::cout << wrong << std::flush;
    return wrong.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
    return 2;
  }
}
