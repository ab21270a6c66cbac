// Events with names, times and shapes, for people who look at a timeline. Off, it costs one predictable branch.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorale::trace {

using Clock = std::chrono::steady_clock;

enum class Kind : uint8_t {
  kSpan,    // what a rank's thread does: "forward", "backward", "optimizer"
  kCall,    // a call among ranks, from its start to its end, whichever thread works on it
  kComm,    // what a rank's thread spends on such calls: starting them, waiting for them
  kBucket,  // gradients that are reduced together, from the call to their being there
  kCounts,  // how much of some things there is at a moment
};

// What a call among ranks moves.
struct Traffic {
  std::string call;  // "all_reduce"; "wait"
  std::string dtype;
  std::string group;
  std::vector<int> ranks{};                      // of the group: global ones, ascending
  std::vector<int64_t> in_elems{}, out_elems{};  // one number, or one for each rank
};

struct Event {
  std::string name;  // "shm:all_reduce"
  int rank = -1;     // the rank it belongs to, where ranks are threads of one process
  Clock::time_point start, end;
  bool async = false;
  std::vector<std::vector<int64_t>> shapes{};  // of inputs
  Kind kind = Kind::kSpan;
  std::optional<Traffic> traffic{};  // of calls
  std::vector<std::pair<std::string, int64_t>> counts{};
};

namespace detail {
inline std::atomic<bool> enabled{false};
inline thread_local int rank = -1;
}  // namespace detail
inline bool enabled() { return detail::enabled.load(std::memory_order_relaxed); }

// Process-wide. Starts anew, keeping the last `capacity` events.
void start(size_t capacity = 1 << 16);
// Stops, and returns what was recorded, in the order of the ends.
std::vector<Event> stop();
// No effect when it is off.
void record(Event event);

// Which (global) rank the calling thread works for: the last one that it connected to a group as; -1: none.
inline int rank() { return detail::rank; }
inline void set_rank(int rank) { detail::rank = rank; }

// What the calling thread does from here to the end of the scope.
class Span {
 public:
  explicit Span(const char* name, Kind kind = Kind::kSpan, int of_rank = rank())
      : name_(enabled() ? name : nullptr), kind_(kind), rank_(of_rank) {
    if (name_) [[unlikely]]
      start_ = Clock::now();
  }
  ~Span() { end(); }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void end() {
    if (const char* name = std::exchange(name_, nullptr)) [[unlikely]]
      record({.name = name, .rank = rank_, .start = start_, .end = Clock::now(), .kind = kind_});
  }

 private:
  const char* name_;
  Kind kind_;
  int rank_;
  Clock::time_point start_;
};

// The text that chrome://tracing and Perfetto read.
std::string chrome_json(const std::vector<Event>& events);
// The calls of one rank in the order in which they were started, for tools that replay or study traffic: a list `nodes`
// with one node per group, and one per call or wait with group, dtype and numbers of elements.
std::string execution_json(const std::vector<Event>& events, int rank);

}  // namespace chorale::trace
