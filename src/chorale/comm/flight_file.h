// Where the last calls of a rank are written when something fails.
//
// Note [Records of a job]
// Records of one job lie in one folder. Where CHORALE_FLIGHT_DIR names one, it is that: `chorale run` makes one for
// each job, and removes it when the job has ended well. Elsewhere (torchrun, mpirun, ranks that were started by hand)
// it is chorale-flights-JOB in the folder for temporary files, made with the first record; JOB is a random number, that
// of the first group in which this process met others. There a process that ends well, with status 0, takes its own
// records away, and the last one the folder. A process keeps its last kMostRecords: a job that goes on after failures
// does not fill the disk.
#pragma once

#include <string>
#include <vector>

namespace chorale::comm {

inline constexpr size_t kMostRecords = 16;

// Names the job of this process, unless it has a name.
void name_job(const std::string& name);

// Something that happened to the job, such as a change of its ranks: the last kMostEvents are in each record.
inline constexpr size_t kMostEvents = 16;
void note_event(const std::string& text);
std::vector<std::string> noted_events();

// Writes the text to a new file, which only its owner may read, in the folder of the job and returns the path; empty
// when that failed. Never throws.
std::string write_flight(int rank, const std::string& text) noexcept;

// What a process that ends with this status does with its records; called at its end.
void tidy_flights(int status) noexcept;

}  // namespace chorale::comm
