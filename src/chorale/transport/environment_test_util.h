// Variables for the length of a test.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "chorale/base/config.h"

namespace chorale::transport {

// What is set is put back. Not for tests with other threads that read the environment.
class ScratchEnvironment {
 public:
  // Takes away everything that a launcher could have set.
  ScratchEnvironment() {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "OMPI_MCA_ess_base_jobid",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_ID",
                             "SLURM_STEP_NUM_NODES",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_NODELIST",
                             "CHORALE_STORE",
                             "CHORALE_SECRET_FD",
                             "CHORALE_SECRET_FILE",
                             "CHORALE_IFACE",
                             "GLOO_SOCKET_IFNAME",
                             "NCCL_SOCKET_IFNAME",
                             "TORCHELASTIC_RUN_ID",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RESTART_COUNT"}) {
      unset(name);
    }
  }
  ~ScratchEnvironment() {
    for (const auto& [name, value] : before_) put(name, value);
  }
  ScratchEnvironment(const ScratchEnvironment&) = delete;
  ScratchEnvironment& operator=(const ScratchEnvironment&) = delete;

  void set(const std::string& name, const std::string& value) {
    before_.emplace(name, config::env(name.c_str()));
    put(name, value);
  }
  void unset(const std::string& name) {
    before_.emplace(name, config::env(name.c_str()));
    put(name, std::nullopt);
  }

 private:
  static void put(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      setenv(name.c_str(), value->c_str(), 1);
    } else {
      unsetenv(name.c_str());
    }
  }
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace chorale::transport
