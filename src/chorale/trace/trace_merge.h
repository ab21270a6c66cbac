// The timelines of ranks that are processes, as one.
#pragma once

#include <string>
#include <vector>

namespace chorale::trace {

// Joins what chrome_json() gave on each rank; the clocks of the ranks must agree. Throws InvalidArgument for anything
// else.
std::string merged_chrome_json(const std::vector<std::string>& documents);

}  // namespace chorale::trace
