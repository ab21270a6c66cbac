// Inside comm: whether somebody else wants the core of a rank that waits.
//
// Note [A core that others want]
// A rank that has a core to itself waits best by spinning. Beside a program that computes, spinning spends the rank's
// share of the core on nothing, and yielding is worse: the core comes back after the other program's whole turn,
// however early the awaited data came. A sleeping rank is woken by a bell, and a thread that wakes goes before one that
// computes. So a wait that notices that its core is wanted sleeps soon, and so do the waits after it. The load of the
// machine does not tell whether a core is wanted (it counts the ranks themselves, and minutes). Two looks at the clock
// do, between which a spinning or yielding thread did next to nothing, more than 100 us apart: another thread ran.
// Where data was moved in between, the system knows better: for how long the thread was ready and did not run
// (schedstat). That is one sum since the thread began, so a gap is judged by the share of the time since the last
// reading: the first gap after a long time gives the sum to compare with, and the next one, soon after it where the
// core is wanted, decides.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>

#include "chorale/base/deadline.h"

namespace chorale::comm {

class CoreWatch {
 public:
  using Clock = Deadline::Clock;
  static constexpr std::chrono::microseconds kGap{100};
  // Where ranks share cores, others of them run in between anyway: only what takes longer than a turn of theirs counts.
  static constexpr std::chrono::microseconds kSharedGap{1000};

  // `core_each`: ranks do not outnumber cores.
  static std::chrono::microseconds gap(bool core_each) { return core_each ? kGap : kSharedGap; }

  // How long a thread was ready to run and did not, since it began.
  struct Delay {
    pid_t thread;
    std::chrono::nanoseconds time;
  };
  // Nothing where the system does not tell.
  using ReadDelay = std::optional<Delay> (*)();
  static std::optional<Delay> delay_of_this_thread();

  explicit CoreWatch(ReadDelay read_delay = &delay_of_this_thread) : read_delay_(read_delay) {}

  // A wait that begins now should sleep soon.
  bool is_wanted() { return until_ != Clock::time_point{} && is_wanted_at(Clock::now()); }
  bool is_wanted_at(Clock::time_point now);
  // A thread found a gap in its time while it waited. True when the core was wanted.
  [[gnu::cold]] bool note_gap(Clock::time_point now);

 private:
  // How long this thread stood in line since the last time; none where that was another thread.
  std::optional<std::chrono::nanoseconds> in_line_since_last_time();
  // Whether that is a good part of the time since then.
  bool stood_in_line(Clock::time_point now);

  ReadDelay read_delay_;
  Clock::time_point until_{}, read_at_{};  // the former is zero when the core is the rank's own
  std::optional<Delay> delay_;
};

}  // namespace chorale::comm
