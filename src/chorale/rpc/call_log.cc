#include "chorale/rpc/call_log.h"

#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "chorale/dist_autograd/contexts.h"
#include "chorale/trace/trace.h"

namespace chorale::rpc {
namespace {

size_t place_of(std::chrono::nanoseconds time) {
  const auto ns = static_cast<uint64_t>(std::max<int64_t>(time.count(), 8));
  const auto power = static_cast<size_t>(std::bit_width(ns)) - 1;
  return 8 * power + ((ns >> (power - 3)) & 7);
}
// The middle of what is counted there.
double time_at(size_t place) {
  return std::ldexp(8.5 + static_cast<double>(place % 8), static_cast<int>(place / 8) - 3) / 1e3;
}

template <class Counts>
double quantile(const Counts& counts, double share) {
  uint64_t total = 0, below = 0;
  for (const uint32_t count : counts) total += count;
  for (size_t place = 0; place < counts.size(); ++place) {
    below += counts[place];
    if (below > 0 && static_cast<double>(below) >= share * static_cast<double>(total)) return time_at(place);
  }
  return 0;
}

size_t bytes_of(const Message& message) {
  size_t bytes = message.payload.size();
  for (const Tensor& x : message.tensors) {
    const Tensor& dense = dist_autograd::differentiable(x);
    bytes += static_cast<size_t>(dense.elems()) * dense.elem_bytes();
  }
  return bytes;
}

// The first value of a call is its function's name, behind the two numbers of a reference that it makes.
std::string_view function_of(const Message& message) {
  const bool makes = message.kind == MessageKind::kRemoteCall || message.kind == MessageKind::kRemoteOp;
  if (message.kind == MessageKind::kFetch) return "to_here";
  const size_t at = makes ? 2 * sizeof(uint64_t) : 0;
  uint64_t length = 0;
  if (message.payload.size() < at + sizeof length) return {};
  std::memcpy(&length, message.payload.data() + at, sizeof length);
  const auto* text = reinterpret_cast<const char*>(message.payload.data() + at + sizeof length);
  return {text, std::min<uint64_t>({length, message.payload.size() - at - sizeof length, 200})};
}

}  // namespace

CallLog::Ticket CallLog::enter(int to, const Message& request) {
  if (!is_call(request.kind) && request.kind != MessageKind::kFetch) return {};
  const auto now = Clock::now();
  const size_t bytes = bytes_of(request);
  const std::lock_guard lock(mutex_);
  const uint64_t call = next_++;
  if (entries_.size() < kCalls) entries_.emplace_back();
  Entry& entry = entries_[(call - 1) % kCalls];
  entry.call = call;
  entry.to = to;
  entry.kind = request.kind;
  entry.state = State::kPending;
  entry.function = function_of(request);
  entry.bytes = bytes;
  entry.start = now;
  CallFigures& figures = pairs_[to].figures;
  figures.worker = to;
  ++figures.in_flight;
  figures.bytes_sent += static_cast<int64_t>(bytes);
  return {call, to, now};
}

void CallLog::leave(const Ticket& ticket, const Message* answer) {
  if (ticket.call == 0) return;
  const auto now = Clock::now();
  const bool failed = !answer || answer->kind != MessageKind::kReturn;
  trace::Event event;
  {
    const std::lock_guard lock(mutex_);
    Pair& pair = pairs_[ticket.to];
    --pair.figures.in_flight;
    ++pair.figures.calls;
    if (failed) ++pair.figures.failed;
    if (answer) pair.figures.bytes_received += static_cast<int64_t>(bytes_of(*answer));
    ++pair.times[place_of(now - ticket.start)];
    Entry& entry = entries_[(ticket.call - 1) % kCalls];
    if (entry.call != ticket.call) return;  // overwritten by a later call
    entry.state = failed ? State::kFailed : State::kDone;
    entry.end = now;
    if (!trace::enabled()) return;
    event = {.name = concat("rpc:", entry.function),
             .rank = trace::rank(),
             .start = entry.start,
             .end = now,
             .async = true,
             .kind = trace::Kind::kCall,
             .traffic = trace::Traffic{.call = std::string(name_of(entry.kind)),
                                       .dtype = "u8",
                                       .group = "rpc",
                                       .ranks = {entry.to},
                                       .in_elems = {static_cast<int64_t>(entry.bytes)}}};
  }
  trace::record(std::move(event));
}

std::vector<CallFigures> CallLog::figures() const {
  const std::lock_guard lock(mutex_);
  std::vector<CallFigures> all;
  all.reserve(pairs_.size());
  for (const auto& [worker, pair] : pairs_) {
    all.push_back(pair.figures);
    all.back().p50_us = quantile(pair.times, 0.5);
    all.back().p99_us = quantile(pair.times, 0.99);
  }
  return all;
}

std::string CallLog::json(int own, const std::vector<WorkerInfo>& workers, const std::string& error) const {
  using nlohmann::json;
  const auto us = [](Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  };
  json members = json::array(), names = json::array(), calls = json::array();
  for (const WorkerInfo& worker : workers) {
    members.push_back(worker.id);
    names.push_back(worker.name);
  }
  const std::lock_guard lock(mutex_);
  for (uint64_t call = next_ > kCalls ? next_ - kCalls : 1; call < next_; ++call) {
    const Entry& entry = entries_[(call - 1) % kCalls];
    constexpr const char* kStates[] = {"pending", "done", "failed"};
    json row{{"number", entry.call},
             {"kind", name_of(entry.kind)},
             {"to", entry.to},
             {"function", entry.function},
             {"bytes", entry.bytes},
             {"state", kStates[static_cast<size_t>(entry.state)]},
             {"start_us", us(entry.start)}};
    if (entry.end != Clock::time_point{} && entry.state != State::kPending) row["end_us"] = us(entry.end);
    calls.push_back(std::move(row));
  }
  const json record{{"format", "chorale-flight-1"},
                    {"group", "rpc"},
                    {"rank", own},
                    {"members", std::move(members)},
                    {"names", std::move(names)},
                    {"process", getpid()},
                    {"now_us", us(Clock::now())},
                    {"error", error},
                    {"calls", json::array()},
                    {"remote_calls", std::move(calls)}};
  return record.dump(1, ' ', false, json::error_handler_t::replace);
}

}  // namespace chorale::rpc
