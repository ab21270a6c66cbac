// Events with names, times and shapes, for people who look at a timeline. Off, it costs one predictable branch.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace chorale::trace {

using Clock = std::chrono::steady_clock;

struct Event {
  std::string name;  // "shm:all_reduce"
  int rank = -1;     // who did it, where ranks are threads of one process
  Clock::time_point start, end;
  bool async = false;
  std::vector<std::vector<int64_t>> shapes;  // of inputs
};

namespace detail {
inline std::atomic<bool> enabled{false};
}
inline bool enabled() { return detail::enabled.load(std::memory_order_relaxed); }

// Process-wide. Starts anew, keeping the last `capacity` events.
void start(size_t capacity = 1 << 16);
// Stops, and returns what was recorded, in the order of the ends.
std::vector<Event> stop();
// No effect when it is off.
void record(Event event);

// For chrome://tracing and Perfetto.
std::string chrome_json(const std::vector<Event>& events);

}  // namespace chorale::trace
