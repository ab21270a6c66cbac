// The only reader of the environment: what a variable means is said here once.
#pragma once

#include <optional>
#include <string>

namespace chorale::config {

// The variable's value, or nothing when it is unset or empty.
std::optional<std::string> env(const char* name);

// True when a launcher's variables say that this process is one of several ranks (torchrun's WORLD_SIZE, Open MPI's,
// PMI's, Slurm's). Tensors then live in memory that peers can map.
bool one_of_several_ranks();

}  // namespace chorale::config
