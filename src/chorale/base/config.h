// The only reader of the environment. What a value means is parsed where it is used, and said in docs/usage/run.md.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace chorale::config {

// The variable's value, or nothing when it is unset or empty.
std::optional<std::string> env(const char* name);

// The whole environment as NAME=value, for a process that is started: with these values instead of its own; an empty
// value takes the variable away.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes);

// True when a launcher's variables say that this process is one of several ranks (torchrun's WORLD_SIZE, Open MPI's,
// PMI's, those of a step of Slurm's). Tensors then live in memory that peers can map.
bool one_of_several_ranks();
// The rank that those variables give this process; 0 where there is no launcher.
int launched_rank();

}  // namespace chorale::config
