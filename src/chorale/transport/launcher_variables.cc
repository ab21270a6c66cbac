#include "chorale/transport/launcher_variables.h"

#include <array>
#include <climits>
#include <cstdint>

#include "chorale/base/config.h"
#include "chorale/base/env_number.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

template <class Number = int>
std::optional<Number> number_in(const char* variable, int64_t least, int64_t most) {
  const auto number = config::whole_number(variable, least, most);
  return number ? std::optional(static_cast<Number>(*number)) : std::nullopt;
}
std::optional<int> rank_in(const char* variable) { return number_in(variable, 0, config::kMostWorldSize - 1); }
std::optional<int> size_in(const char* variable) { return number_in(variable, 1, config::kMostWorldSize); }

// Names of variables; "" where there is none.
struct Source {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr Source kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Source kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                          "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Source kPmi{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Source kSlurm{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""};
constexpr std::array kSources{&kTorchrun, &kOpenMpi, &kPmi, &kSlurm};

// A batch script, or a shell in an allocation, has Slurm's variables too, but is no rank.
bool is_there(const Source& source) {
  if (&source == &kSlurm && !config::env("SLURM_STEP_ID")) return false;
  return config::env(source.rank) || config::env(source.size);
}

bool started_inside_of(const Source& inner, const Source& outer) {
  if (&inner == &kTorchrun) return config::env("CHORALE_STORE") || config::env("TORCHELASTIC_RUN_ID");
  return &outer == &kSlurm;
}

void check_agreement(const char* mine, const char* other) {
  const auto a = number_in(mine, 0, config::kMostWorldSize), b = number_in(other, 0, config::kMostWorldSize);
  CHORALE_CHECK(!a || !b || *a == *b, "[rendezvous] ", mine, "=", a.value_or(0), " contradicts ", other, "=",
                b.value_or(0), "; unset those that are not meant");
}

// "node[03-07,9],gpu1" -> "node03"
std::string first_node(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  std::string name = list.substr(0, end);
  if (end == std::string::npos || list[end] == ',') return name;
  const size_t number = end + 1;
  return name + list.substr(number, list.find_first_of("-,]", number) - number);
}

void add_slurm_defaults(LauncherVariables& found) {
  if (size_in("SLURM_STEP_NUM_NODES") == 1) found.local_size = found.world_size;
  const auto job = config::whole_number("SLURM_JOB_ID", 0, INT64_MAX);
  if (job) found.job = concat("slurm-", *job, "-", config::env("SLURM_STEP_ID").value_or(""));
  const auto nodes = config::env("SLURM_STEP_NODELIST");
  if (!found.master_addr && nodes) found.master_addr = first_node(*nodes);
  if (!found.master_port && job) found.master_port = static_cast<uint16_t>(20000 + *job % 20000);
}

}  // namespace

LauncherVariables find_launcher_variables() {
  LauncherVariables found;
  found.store = config::env("CHORALE_STORE");
  found.master_addr = config::env("MASTER_ADDR");
  found.master_port = number_in<uint16_t>("MASTER_PORT", 0, UINT16_MAX);
  const Source* taken = nullptr;
  for (const Source* source : kSources) {
    if (!is_there(*source)) continue;
    if (taken) {
      if (started_inside_of(*taken, *source)) continue;
      check_agreement(taken->rank, source->rank);
      check_agreement(taken->size, source->size);
      continue;
    }
    taken = source;
    found.rank = rank_in(source->rank);
    found.world_size = size_in(source->size);
    found.local_rank = rank_in(source->local_rank);
    found.local_size = size_in(source->local_size);
    if (source == &kSlurm) add_slurm_defaults(found);
    if (source == &kOpenMpi) {
      if (const auto job = config::env("OMPI_MCA_ess_base_jobid")) found.job = "openmpi-" + *job;
    }
  }
  found.run = found.job;
  if (taken == &kTorchrun) found.run = config::env("TORCHELASTIC_RUN_ID").value_or("");
  return found;
}

int restart_count() {
  if (!config::env("CHORALE_STORE") && !config::env("TORCHELASTIC_RUN_ID")) return 0;
  return number_in("TORCHELASTIC_RESTART_COUNT", 0, INT_MAX).value_or(0);
}

}  // namespace chorale::transport
