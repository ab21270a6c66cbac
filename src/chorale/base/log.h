// What is worth a line but is not an error of the caller: on standard error, with the time.
#pragma once

#include <string>

namespace chorale {

void log_info(const std::string& message);
void log_warning(const std::string& message);

// Lines name their speaker from now on ("rank 3"): for one of several programs whose launcher does not do it.
void log_as(const std::string& who);

}  // namespace chorale
