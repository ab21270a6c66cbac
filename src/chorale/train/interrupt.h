// Ctrl-C and its like: asked for once, the trainer finishes the step and saves; asked for twice, the process ends.
#pragma once

namespace chorale::train {

class Interrupt {
 public:
  // From now on SIGINT, SIGTERM and SIGHUP are only noted; each acts as ever when it comes a second time.
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Whether a signal has come since it was constructed.
  static bool requested();
};

}  // namespace chorale::train
