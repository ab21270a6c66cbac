// Ranks for tests: threads of this process, or processes started by exec.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "chorale/comm/group.h"

namespace chorale::comm {

// Runs `body` on `size` ranks, each a thread with its own end of a new group. A rank that throws leaves the group; the
// first exception is rethrown here when all have ended. Under mpirun (tests/mpi_test.py) the process itself is a rank
// of an mpi group, if there are `size` of them; otherwise the test is reported as skipped.
void run_ranks(int size, const std::function<void(Group&)>& body, const GroupOptions& options = {});
// The sizes that a test runs with: all of the list, and under mpirun the one that there is, if it is in the list.
std::vector<int> sizes_to_run(const std::vector<int>& sizes);

// The same on several hosts: rank r is a thread that behaves as if it were on host hosts[r], and ranks of different
// hosts talk through tls on 127.0.0.1. Under mpirun the test is reported as skipped.
void run_hosts(const std::vector<int>& hosts, const std::function<void(Group&)>& body,
               const GroupOptions& options = {});

struct RunningRanks {
  std::vector<pid_t> pids;
};
inline constexpr int kSkipped = 77;
// Runs `body` on `size` processes: this test program, executed again for the same test, which comes to this same call
// and does the body's work there. What the test does before the call, it does in every process. Returns how each ended:
// its exit status (0: all is well, 1: a check failed or an exception got out, kSkipped: GTEST_SKIP), or minus the
// signal that ended it. `meanwhile`, if given, runs here while they do. Under mpirun the test is reported as skipped.
std::vector<int> run_processes(int size, const std::function<void(Group&)>& body, const GroupOptions& options = {},
                               const std::function<void(const RunningRanks&)>& meanwhile = {});
// True in a process that run_processes started.
bool is_rank_process();

// Both kinds, one after the other, and all is well with all of them. Under mpirun only mpirun's ranks run.
void run_threads_and_processes(int size, const std::function<void(Group&)>& body, const GroupOptions& options = {});
// The same, and on two hosts as well.
void run_everywhere(int size, const std::function<void(Group&)>& body, const GroupOptions& options = {});

// The message of the CommError that `call` throws, which must blame this rank (a global one).
std::string message_blaming(int culprit, const std::function<void()>& call);

// All-reduces of floats whose order matters, of our own memory and of foreign memory, small and large: their bits are
// those of Note [Order of sums] in vec/combine.h.
void expect_sums_in_order(Group& group);

}  // namespace chorale::comm
