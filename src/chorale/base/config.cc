#include "chorale/base/config.h"

#include <cstdlib>

namespace chorale::config {

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

bool one_of_several_ranks() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    if (const auto size = env(name); size && std::atoi(size->c_str()) > 1) return true;
  }
  return false;
}

}  // namespace chorale::config
