#include "chorale/base/trace.h"

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>

namespace chorale::trace {
namespace {

struct Ring {
  std::mutex mutex;
  std::vector<Event> events;
  size_t capacity = 0;
  size_t next = 0;  // where the oldest is, once it is full
};
Ring& ring() {
  static auto* const only = new Ring;
  return *only;
}

}  // namespace

void start(size_t capacity) {
  Ring& r = ring();
  const std::lock_guard lock(r.mutex);
  r.events.clear();
  r.capacity = std::max<size_t>(capacity, 1);
  r.next = 0;
  detail::enabled.store(true);
}

std::vector<Event> stop() {
  detail::enabled.store(false);
  Ring& r = ring();
  const std::lock_guard lock(r.mutex);
  std::rotate(r.events.begin(), r.events.begin() + static_cast<std::ptrdiff_t>(r.next), r.events.end());
  r.next = 0;
  return std::exchange(r.events, {});
}

void record(Event event) {
  if (!enabled()) return;
  Ring& r = ring();
  const std::lock_guard lock(r.mutex);
  if (r.events.size() < r.capacity) {
    r.events.push_back(std::move(event));
    return;
  }
  r.events[r.next] = std::move(event);
  r.next = (r.next + 1) % r.capacity;
}

std::string chrome_json(const std::vector<Event>& events) {
  using nlohmann::json;
  const auto us = [](auto time) { return std::chrono::duration<double, std::micro>(time).count(); };
  json rows = json::array();
  for (const Event& event : events) {
    rows.push_back({{"name", event.name},
                    {"ph", "X"},
                    {"pid", 0},
                    {"tid", event.rank},
                    {"ts", us(event.start.time_since_epoch())},
                    {"dur", us(event.end - event.start)},
                    {"args", {{"shapes", event.shapes}, {"async", event.async}}}});
  }
  return json{{"traceEvents", rows}}.dump();
}

}  // namespace chorale::trace
