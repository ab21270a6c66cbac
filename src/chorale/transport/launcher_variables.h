// What launchers tell a process through its environment.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace chorale::transport {

struct LauncherVariables {
  std::optional<int> rank, world_size, local_rank, local_size;
  // Where rank 0 hosts the store.
  std::optional<std::string> master_addr;
  std::optional<uint16_t> master_port;
  // A store that the launcher hosts itself (`chorale run`): CHORALE_STORE.
  std::optional<std::string> store;
  // A name for this job that all its ranks know, where the launcher gives one; empty otherwise.
  std::string job;
  // Names the launcher's run: the same for all its ranks and no others; empty: not known.
  std::string run;
};

// Looks for, in this order:
//   1. torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (`chorale run`, torchrun, or set by hand)
//   2. Open MPI's: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE
//   3. PMI's (MPICH, Intel MPI): PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
//   4. Slurm's, of a step that srun started: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NUM_NODES
// and takes everything from the first of which a rank or a size is set. MASTER_ADDR and MASTER_PORT count for all of
// them; Slurm's default is the first node of the step, and a port made from the job's number.
//
// Two of them that disagree about rank or size are an InvalidArgument that shows both, except where one is known to
// have started the other: `chorale run` and torchrun inside of anything, and Open MPI or PMI inside a Slurm job.
LauncherVariables find_launcher_variables();

// How often the launcher that started this process has started the job again: TORCHELASTIC_RESTART_COUNT, which counts
// only beside the launcher's other variables (CHORALE_STORE or TORCHELASTIC_RUN_ID); one that was left in a shell does
// not.
int restart_count();

}  // namespace chorale::transport
