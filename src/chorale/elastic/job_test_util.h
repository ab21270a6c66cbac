// A small training job whose ranks die on schedule: for tests with threads, and for processes of a launcher.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chorale/elastic/elastic.h"

namespace chorale::elastic {

// The rank that has this number at the time dies in this step (the first that is not applied yet) and phase; each entry
// of a schedule counts once. Phases: begin forward backward bucket copy commit average update applied agreement
// meeting transfer finish; where each rank has a part, copy, recopy (one behind a change of ranks) and lost (in
// ShardedOptions::lost, before values are there).
struct Kill {
  int rank = 0;
  int64_t step = 0;
  std::string phase;
  bool together = false;  // with the others of this moment for which that is said: not before they have come to it
};
// "1@3:backward 0@5:commit"
std::vector<Kill> parse_kills(const std::string& text);
// A schedule of up to three deaths, some of them at the same moment.
std::vector<Kill> random_kills(uint64_t seed, int ranks, int64_t steps, bool with_copies = false);
std::string text_of(const std::vector<Kill>& kills);

// How gradients are averaged.
enum class JobHook : uint8_t {
  kNone,
  kPowerSgd,
  kPostLocalSgd,  // among the ranks of this host
  kLocalSgd,      // not at all, from some step on; parameters are averaged now and then
};

// A job of which each rank has a part.
struct ShardedJob {
  ShardedOptions options{};
  bool hybrid = false;  // two replicas, while the number of ranks is even
};

struct JobOptions {
  Seat seat;
  int64_t steps = 8;
  int ranks = 3;  // at the start
  std::vector<Kill> kills{};
  std::function<void()> die;                        // throws, or ends the process
  bool draws = false;                               // from the process's generator: not for ranks that are threads
  std::function<void(int64_t step)> before_step{};  // on rank 0
  std::optional<ShardedJob> sharded{};              // instead of replicas
  JobHook hook = JobHook::kNone;
  bool keeps_losses = true;  // which are more memory with each step
};
struct JobResult {
  std::vector<double> losses;  // of all steps
  std::vector<int> sizes;      // how many ranks computed each
  int64_t bits = 0;            // of the parameters
  double forwards = 0;         // that count: what a buffer of the model says
  int64_t drawn = 0;           // words of the generator
  int last_rank = 0;
  std::vector<Change> changes;
  CopyCosts copies;
  std::string hook_state;   // of this rank
  std::string hook_shared;  // what every rank knows alike
};
JobResult run_job(const JobOptions& options);
// The same job without Elastic and without deaths, as one rank of the group: ranks[step] are those that compute a step,
// averaging[step] those that average parameters behind it, and those that leave just stop. For the ranks that stay it
// has losses, bits and the state of the hook.
std::optional<JobResult> run_with_memberships(const comm::Group& all, JobHook hook,
                                              const std::vector<std::vector<int>>& ranks,
                                              const std::vector<std::vector<int>>& averaging);
// The losses of one rank that has every batch for itself. With the same weights, and no other ranks.
std::vector<double> reference_losses(int64_t steps);
inline constexpr int64_t kJobBatch = 12;
// EXPECTs that all is as it would be without deaths.
void expect_undisturbed(const JobResult& result, int64_t steps, bool draws);

}  // namespace chorale::elastic
