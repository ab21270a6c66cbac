// How other processes of the same user tell a launcher something: `chorale resize`.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "chorale/launch/descriptor.h"

namespace chorale::launch {

// A socket without a file, which carries the launcher's process number in its name and ends with it.
class Control {
 public:
  Control();
  int descriptor() const { return listening_.get(); }
  // Answers whoever is waiting, of this user or root: one line for one line.
  void answer(const std::function<std::string(const std::string& request)>& reply) const;

 private:
  Descriptor listening_;
};

// What the launcher says. StateError where no launcher of an elastic job has this process number.
std::string ask_launcher(pid_t launcher, const std::string& request);

}  // namespace chorale::launch
