#include "chorale/base/config.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace chorale::config {

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> lines;
  for (char** line = environ; line && *line; ++line) {
    const std::string text = *line;
    if (!changes.contains(text.substr(0, text.find('=')))) lines.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) lines.push_back(name + "=" + value);
  }
  return lines;
}

bool one_of_several_ranks() {
  for (const std::string_view name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    // A batch script, or a shell in an allocation, has Slurm's variables too, but is no rank.
    if (name == "SLURM_NTASKS" && !env("SLURM_STEP_ID")) continue;
    if (const auto size = env(name.data()); size && std::atoi(size->c_str()) > 1) return true;
  }
  return false;
}

}  // namespace chorale::config
