// When a wait must end. Every wait of ours has one.
#pragma once

#include <algorithm>
#include <chrono>

namespace chorale {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Clock::time_point end) : end_(end) {}
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool passed() const { return Clock::now() >= end_; }
  Clock::time_point end() const { return end_; }
  // Never negative.
  Clock::duration left() const {
    return end_ == Clock::time_point::max() ? Clock::duration::max()
                                            : std::max(end_ - Clock::now(), Clock::duration::zero());
  }
  Deadline earlier(Deadline other) const { return Deadline(std::min(end_, other.end_)); }

 private:
  Clock::time_point end_;
};

inline Deadline within(Deadline::Clock::duration time) { return Deadline(Deadline::Clock::now() + time); }

}  // namespace chorale
