// Where the last calls of a rank are written when something fails.
#pragma once

#include <string>

namespace chorale::comm {

// Writes the text to a new file, which only its owner may read, in CHORALE_FLIGHT_DIR (the folder for temporary files
// if that is not set) and returns the path; empty when that failed. Never throws.
std::string write_flight(int rank, const std::string& text) noexcept;

}  // namespace chorale::comm
