// The workers of a group, and how calls are addressed.
#pragma once

#include <chrono>
#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace chorale::rpc {

// A worker: its name, and its number in the group.
struct WorkerInfo {
  std::string name;
  int id = -1;
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

// How long an answer may take; 0: for ever.
using Timeout = std::chrono::nanoseconds;

// The worker to call, by name, number or WorkerInfo, and for how long to wait for its answer.
//
//   agent.call<embed>("server", ids);
//   agent.call<embed>(rpc::To("server").within(10ms), ids);
class To {
 public:
  To(const char* name) : worker_(std::string(name)) {}           // NOLINT(google-explicit-constructor)
  To(std::string name) : worker_(std::move(name)) {}             // NOLINT(google-explicit-constructor)
  To(const WorkerInfo& worker) : worker_(int64_t{worker.id}) {}  // NOLINT(google-explicit-constructor)
  template <std::integral T>
  // NOLINTNEXTLINE(google-explicit-constructor)
  requires(!std::same_as<T, bool> && !std::same_as<T, char>) To(T id) : worker_(static_cast<int64_t>(id)) {}

  // Instead of the agent's own time; 0: for ever.
  To within(Timeout timeout) const {
    To copy = *this;
    copy.timeout_ = timeout;
    return copy;
  }
  const std::variant<std::string, int64_t>& worker() const { return worker_; }
  const std::optional<Timeout>& timeout() const { return timeout_; }

 private:
  std::variant<std::string, int64_t> worker_;
  std::optional<Timeout> timeout_;
};

// While it lives, calls that this thread begins are waited for at once, so that it cannot write their tensors
// meanwhile.
class CallerWaits {
 public:
  CallerWaits();
  ~CallerWaits();
  CallerWaits(const CallerWaits&) = delete;
  CallerWaits& operator=(const CallerWaits&) = delete;
  static bool does();
};

}  // namespace chorale::rpc

template <>
struct std::hash<chorale::rpc::WorkerInfo> {
  size_t operator()(const chorale::rpc::WorkerInfo& worker) const noexcept {
    return std::hash<std::string>()(worker.name) ^ static_cast<size_t>(worker.id);
  }
};
