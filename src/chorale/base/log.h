// What is worth a line but is not an error of the caller: on standard error, with the time.
#pragma once

#include <string>

namespace chorale {

void log_info(const std::string& message);
void log_warning(const std::string& message);

// Lines say from now on who speaks ("rank 3"): for a program that is one of several and whose launcher does not say it.
void log_as(const std::string& who);

}  // namespace chorale
