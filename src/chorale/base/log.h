// What is worth a line but is not an error of the caller: on standard error, with the time.
#pragma once

#include <string>

namespace chorale {

void log_info(const std::string& message);
void log_warning(const std::string& message);

}  // namespace chorale
