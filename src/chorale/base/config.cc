#include "chorale/base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "chorale/base/env_number.h"

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
    if (!value.empty()) lines.push_back(std::string(name).append("=").append(value));
  }
  return lines;
}

namespace {
// The largest of these variables, or 0; the last one is Slurm's. A batch script, or a shell in an allocation, has
// Slurm's variables too, but is no rank.
int64_t largest_of(std::initializer_list<const char*> names, int64_t least, int64_t most) {
  int64_t largest = 0;
  for (const char* name : names) {
    if (std::string_view(name).starts_with("SLURM_") && !env("SLURM_STEP_ID")) continue;
    largest = std::max(largest, whole_number(name, least, most).value_or(0));
  }
  return largest;
}
}  // namespace

bool one_of_several_ranks() {
  if (env("CHORALE_ELASTIC_FD")) return true;  // an elastic job that begins with one may grow
  return largest_of({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}, 1, kMostWorldSize) > 1;
}

int launched_rank() {
  return static_cast<int>(
      largest_of({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}, 0, kMostWorldSize - 1));
}

}  // namespace chorale::config
