// What the flight recorders of several ranks say together (comm/flight.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace chorale::app {

// Says in plain words, for each group, which rank diverged first, at which call, or stayed behind. Throws
// InvalidArgument for a record that is not one.
std::string explain_flights(const std::vector<nlohmann::json>& records);

}  // namespace chorale::app
