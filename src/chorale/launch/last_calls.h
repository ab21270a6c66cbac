// What the ranks were doing when a job failed, from the flight records that they leave (comm/flight.h).
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace chorale::launch {

struct LastCall {
  int rank = 0;
  std::string text;  // the first call that is not done, or the last: "all_reduce of 1000 f32, #12: pending"
  std::string file;
};

// Where ranks of this environment put their records, unless they are told otherwise.
std::string flight_folder();

// One for each of these processes that left a record in the folder, in the order of ranks. A record that cannot be read
// is passed over: this is for a summary of something worse.
std::vector<LastCall> last_calls(const std::string& folder, const std::map<pid_t, int>& rank_of_process);

}  // namespace chorale::launch
