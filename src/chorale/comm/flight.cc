#include "chorale/comm/flight.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "chorale/base/error.h"
#include "chorale/comm/failure.h"
#include "chorale/comm/flight_file.h"

namespace chorale::comm {
namespace {

constexpr uint64_t kCallsOfThreads = 200;  // so far back another thread's call counts: some steps of training

int32_t own_thread() {
  constinit thread_local int32_t own = 0;  // asking the kernel for it would double the cost of an entry
  if (own == 0) own = gettid();
  return own;
}

// What a debugger and `ps -L` call it; empty when it has ended.
std::string name_of_thread(int32_t thread) {
  std::ifstream file(concat("/proc/self/task/", thread, "/comm"));
  std::string name;
  std::getline(file, name);
  return name;
}

}  // namespace

uint64_t FlightRecorder::enter(const Operation& operation) {
  Entry& entry = entries_[next_ % kCalls];
  entry.call = next_;
  entry.print = operation.print;
  entry.number = operation.number;
  entry.peer = operation.peer;
  entry.thread = own_thread();
  entry.state = State::kPending;
  entry.start = operation.issued;
  entry.end = {};
  return next_++;
}

void FlightRecorder::leave(uint64_t call, bool failed) {
  Entry& entry = entries_[call % kCalls];
  if (entry.call != call) return;  // overwritten long ago
  entry.state = failed ? State::kFailed : State::kDone;
  // The clock that costs nothing, a few milliseconds coarse: this is on the path of every call.
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  entry.end = std::max(entry.start, std::chrono::steady_clock::time_point(std::chrono::seconds(now.tv_sec) +
                                                                          std::chrono::nanoseconds(now.tv_nsec)));
}

std::string FlightRecorder::threads(const Membership& membership) const {
  std::map<int32_t, const Entry*> last;
  for (uint64_t call = next_ > kCallsOfThreads ? next_ - kCallsOfThreads : 0; call < next_; ++call) {
    const Entry& entry = entries_[call % kCalls];
    if (entry.number > 0) last[entry.thread] = &entry;
  }
  if (last.size() < 2) return {};
  std::string text;
  for (const auto& [thread, entry] : last) {
    const std::string name = name_of_thread(thread);
    text += concat(text.empty() ? "" : ", ", "thread ", thread, name.empty() ? " (ended)" : concat(" (", name, ")"),
                   " last entered ", describe(membership, entry->print), " #", entry->number);
  }
  return text;
}

std::string FlightRecorder::json(const Membership& membership, const std::string& error) const {
  using nlohmann::json;
  const auto since_boot = [](std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  };
  json calls = json::array();
  for (uint64_t call = next_ > kCalls ? next_ - kCalls : 0; call < next_; ++call) {
    const Entry& entry = entries_[call % kCalls];
    constexpr const char* kStates[] = {"pending", "done", "failed"};
    json row{{"number", entry.number},
             {"kind", name_of(kind_of(entry.print))},
             {"call", describe(entry.print)},
             {"dtype", name_of(static_cast<DType>(entry.print.dtype))},
             {"count", entry.print.count},
             {"reduce", name_of(static_cast<Reduce>(entry.print.reduce))},
             {"root", entry.print.root},
             {"detail", entry.print.detail},
             {"tag", entry.print.tag},
             {"state", kStates[static_cast<size_t>(entry.state)]},
             {"start_us", since_boot(entry.start)}};
    if (entry.peer >= 0) row["peer"] = membership.members[static_cast<size_t>(entry.peer)];
    if (entry.end != std::chrono::steady_clock::time_point{}) row["end_us"] = since_boot(entry.end);
    calls.push_back(std::move(row));
  }
  const json record{{"format", "chorale-flight-1"},
                    {"group", membership.name},
                    {"rank", membership.members[static_cast<size_t>(membership.rank)]},
                    {"members", membership.members},
                    {"process", getpid()},
                    {"error", error},
                    {"events", noted_events()},
                    {"calls", std::move(calls)}};
  return record.dump(1, ' ', false, json::error_handler_t::replace);
}

std::string FlightRecorder::dump(const Membership& membership, const std::string& error) const noexcept {
  try {
    return write_flight(membership.members[static_cast<size_t>(membership.rank)], json(membership, error) + "\n");
  } catch (...) {
    return {};
  }
}

}  // namespace chorale::comm
