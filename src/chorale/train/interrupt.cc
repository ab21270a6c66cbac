#include "chorale/train/interrupt.h"

#include <csignal>

namespace chorale::train {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
volatile std::sig_atomic_t interrupts = 0;

extern "C" void note_interrupt(int number) {
  interrupts = interrupts + 1;
  std::signal(number, SIG_DFL);  // the second one is not ours any more
}

}  // namespace

Interrupt::Interrupt() {
  interrupts = 0;
  // What was ignored at the start (nohup, trap '' INT) stays so.
  for (const int number : kSignals) {
    if (std::signal(number, note_interrupt) == SIG_IGN) std::signal(number, SIG_IGN);
  }
}
Interrupt::~Interrupt() {
  for (const int number : kSignals) {
    if (std::signal(number, SIG_DFL) == SIG_IGN) std::signal(number, SIG_IGN);
  }
}
bool Interrupt::requested() { return interrupts != 0; }

}  // namespace chorale::train
