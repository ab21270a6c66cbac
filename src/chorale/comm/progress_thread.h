// A thread that moves a group's calls on while the rank's own thread computes. It pays where it has a core to itself;
// elsewhere it takes the core from the computing it should hide behind.
#pragma once

#include <memory>

#include "chorale/comm/engine.h"

namespace chorale::comm {

class ProgressThread {
 public:
  explicit ProgressThread(std::shared_ptr<Engine> engine);

  // Something was started. The thread works until all of it is done, and sleeps then.
  void wake();

 private:
  class Mover;
  std::shared_ptr<Mover> mover_;  // a forked child has no such thread, and leaves it as it is
};

}  // namespace chorale::comm
