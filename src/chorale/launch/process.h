// Starting a process so that it cannot outlive its launcher.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "chorale/launch/descriptor.h"

namespace chorale::launch {

// The file that a shell would start for this name. Throws InvalidArgument when there is none, or one that is not
// executable.
std::string find_program(const std::string& name);

// Pointers as exec wants them, with a null pointer at the end; they are valid as long as the words.
std::vector<char*> pointers_to(const std::vector<std::string>& words);

struct ProcessPlan {
  std::string program;                   // a path
  std::vector<std::string> arguments;    // with the program's name in front
  std::vector<std::string> environment;  // NAME=value
  std::vector<int> cpus;                 // empty: as the launcher
  std::vector<int> inherited;            // descriptors that stay open in it
};

struct StartedProcess {
  pid_t pid = -1;  // also of its process group, which is new
  Descriptor output, errors;
};

// Standard input is empty. The kernel kills the process when the calling thread ends. `before_it_runs` gets the pid
// before the program is executed: what must know of the process knows it in time. Throws StateError when the program
// cannot be executed.
StartedProcess start_process(const ProcessPlan& plan, const std::function<void(pid_t)>& before_it_runs);

}  // namespace chorale::launch
