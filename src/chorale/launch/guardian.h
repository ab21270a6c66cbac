// A process beside the launcher that kills the ranks when the launcher is gone, however that happened.
#pragma once

#include <sys/types.h>

#include <string>

#include "chorale/launch/descriptor.h"

namespace chorale::launch {

// The launcher's end. The guardian reads from a pipe which process groups there are; when the pipe ends, because the
// launcher was killed, it kills those that are left. It is a process of its own session, out of reach of Ctrl-C.
class Guardian {
 public:
  // Starts `program run --guardian FD`: this program itself by default.
  explicit Guardian(const std::string& program = "/proc/self/exe");
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group);
  void forget(pid_t group);

 private:
  void tell(char what, pid_t group);

  Pipe pipe_;
  pid_t pid_ = -1;
};

// The guardian's own main function.
int be_the_guardian(int descriptor);

}  // namespace chorale::launch
