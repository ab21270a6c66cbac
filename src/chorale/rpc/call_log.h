// Inside rpc: what calls of this worker cost, by the worker that was called, and the last of them.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "chorale/rpc/message.h"
#include "chorale/rpc/worker.h"

namespace chorale::rpc {

// Calls of one worker by another.
struct CallFigures {
  int worker = -1;  // that was called
  int64_t calls = 0, failed = 0, in_flight = 0;
  int64_t bytes_sent = 0, bytes_received = 0;
  double p50_us = 0, p99_us = 0;  // from the call to its answer; within an eighth
};

// Thread-safe.
class CallLog {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kCalls = 1000;

  // A call that was entered; other requests than calls and fetches are not: 0.
  struct Ticket {
    uint64_t call = 0;
    int to = -1;
    Clock::time_point start{};
  };
  Ticket enter(int to, const Message& request);
  void leave(const Ticket& ticket, const Message* answer);

  std::vector<CallFigures> figures() const;
  // The last calls as text.
  std::string json(int own, const std::vector<WorkerInfo>& workers, const std::string& error) const;

 private:
  enum class State : uint8_t { kPending, kDone, kFailed };
  struct Entry {
    uint64_t call = 0;
    int to = -1;
    MessageKind kind = MessageKind::kCall;
    State state = State::kPending;
    std::string function{};
    size_t bytes = 0;
    Clock::time_point start{}, end{};
  };
  struct Pair {
    CallFigures figures;
    std::array<uint32_t, 512> times{};  // eight for each power of two of nanoseconds
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  uint64_t next_ = 1;
  std::map<int, Pair> pairs_;
};

}  // namespace chorale::rpc
