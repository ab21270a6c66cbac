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

// Where the ranks of a job put their records (Note [Records of a job] in comm/flight_file.h): CHORALE_FLIGHT_DIR, else
// the folder of the logs, else a new one.
class FlightFolder {
 public:
  // `logs` may be empty.
  explicit FlightFolder(const std::string& logs);
  // Removes a folder that was made and has stayed empty.
  ~FlightFolder();
  FlightFolder(const FlightFolder&) = delete;
  FlightFolder& operator=(const FlightFolder&) = delete;

  // Absolute.
  const std::string& path() const { return path_; }
  // The job has ended well: removes what these processes have left, unless the user has named the folder.
  void tidy(const std::map<pid_t, int>& rank_of_process) const;

 private:
  std::string path_;
  bool is_ours_ = false, is_users_ = false;
};

// One for each of these processes that left a record in the folder, in the order of ranks. A record that cannot be read
// is passed over: this is for a summary of something worse.
std::vector<LastCall> last_calls(const std::string& folder, const std::map<pid_t, int>& rank_of_process);

}  // namespace chorale::launch
