#include "chorale/launch/room.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "chorale/base/error.h"
#include "chorale/base/host.h"

namespace chorale::launch {
namespace {

constexpr uint64_t kOwnDescriptors = 64;

// The first word of a file of the system's; 0 where it is no number ("max"), or there is none.
uint64_t number_in(const char* file) {
  std::ifstream in(file);
  uint64_t value = 0;
  return in >> value ? value : 0;
}

void check_processes(uint64_t ranks, uint64_t limit, const char* which) {
  CHORALE_CHECK(limit == 0 || limit == RLIM_INFINITY || ranks < limit, "[launch] ", ranks, " ranks are more than the ",
                limit, " processes that ", which, " allows; start fewer (-n), or raise it");
}

}  // namespace

void check_room(const RankNeeds& needs) {
  const auto ranks = static_cast<uint64_t>(needs.ranks);
  const double wanted = static_cast<double>(ranks) * static_cast<double>(needs.bytes);
  const auto there = static_cast<double>(memory_room().total_bytes);
  CHORALE_CHECK(wanted <= there, "[launch] ", ranks, " ranks take ",
                fmt::format("{:.4g} GiB of memory or more, {:.4g} MiB each; this machine has {:.4g} GiB",
                            wanted / (1 << 30), static_cast<double>(needs.bytes) / (1 << 20), there / (1 << 30)),
                ". Start fewer (-n), or some on other nodes (--nnodes)");
  check_processes(ranks, number_in("/proc/sys/kernel/pid_max"), "this machine (kernel.pid_max)");
  check_processes(ranks, number_in("/sys/fs/cgroup/pids.max"), "the control group (pids.max)");
  rlimit limit{};
  // It does not count for root.
  if (geteuid() != 0 && getrlimit(RLIMIT_NPROC, &limit) == 0)
    check_processes(ranks, limit.rlim_cur, "the user's limit (ulimit -u)");
  const uint64_t descriptors = ranks * static_cast<uint64_t>(needs.descriptors) + kOwnDescriptors;
  const bool is_known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max != RLIM_INFINITY;
  // A few are left to fail by themselves: small limits are the business of the call that needs one more.
  CHORALE_CHECK(!is_known || ranks < kOwnDescriptors || descriptors <= limit.rlim_max, "[launch] ", ranks,
                " ranks take ", descriptors, " descriptors of the launcher, of at most ", limit.rlim_max,
                " (ulimit -Hn); start fewer (-n), or raise it");
}

}  // namespace chorale::launch
