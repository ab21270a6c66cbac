#include "chorale/trace/trace.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "chorale/base/error.h"
#include "chorale/trace/trace_merge.h"

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

namespace {

using nlohmann::json;

// The distance between the ranks of a group; 0 where it is not always the same.
int stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 1;
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return 0;
  }
  return stride;
}

json group_json(const Traffic& traffic) {
  return {{"pg_name", traffic.group},
          {"pg_desc", traffic.group},
          {"pg_size", traffic.ranks.size()},
          {"global_rank_start", traffic.ranks.empty() ? 0 : traffic.ranks.front()},
          {"global_rank_stride", stride_of(traffic.ranks)}};
}

json traffic_json(const Traffic& traffic) {
  json node{{"collective_name", traffic.call}, {"dtype", traffic.dtype}};
  if (traffic.call == "wait") return node;
  node.update(group_json(traffic));
  const auto sum = [](const std::vector<int64_t>& parts) { return std::accumulate(parts.begin(), parts.end(), 0LL); };
  const auto split = [](const std::vector<int64_t>& parts) { return parts.size() > 1 ? json(parts) : json::array(); };
  node["in_msg_nelems"] = sum(traffic.in_elems);
  node["out_msg_nelems"] = sum(traffic.out_elems);
  node["in_split_size"] = split(traffic.in_elems);
  node["out_split_size"] = split(traffic.out_elems);
  return node;
}

}  // namespace

namespace {

// A rank is a process of the timeline: what its thread does on one track, what it spends on calls among ranks on the
// next, and calls and buckets under way on as many more as are needed for none to overlap another.
constexpr int kOwnTrack = 0, kWaitTrack = 1, kFirstFlightTrack = 2;

json name_row(const char* what, int rank, int track, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", track}, {"args", {{"name", name}}}};
}
std::string track_name(int track) {
  if (track == kOwnTrack) return "computing";
  if (track == kWaitTrack) return "communication: this rank is busy";
  return "communication: under way";
}

// The track of each event.
std::vector<int> tracks_of(const std::vector<Event>& events) {
  std::vector<size_t> by_start(events.size());
  std::iota(by_start.begin(), by_start.end(), 0);
  std::stable_sort(by_start.begin(), by_start.end(),
                   [&](size_t a, size_t b) { return events[a].start < events[b].start; });
  std::map<int, std::vector<Clock::time_point>> busy_until;  // of the flight tracks of a rank
  std::vector<int> tracks(events.size());
  for (size_t i : by_start) {
    const Event& event = events[i];
    if (event.kind != Kind::kCall && event.kind != Kind::kBucket) {
      tracks[i] = event.kind == Kind::kComm ? kWaitTrack : kOwnTrack;
      continue;
    }
    auto& lanes = busy_until[event.rank];
    auto lane = std::find_if(lanes.begin(), lanes.end(), [&](Clock::time_point end) { return end <= event.start; });
    if (lane == lanes.end()) lane = lanes.insert(lane, Clock::time_point{});
    *lane = event.end;
    tracks[i] = kFirstFlightTrack + static_cast<int>(lane - lanes.begin());
  }
  return tracks;
}

}  // namespace

std::string chrome_json(const std::vector<Event>& events) {
  const auto us = [](auto time) { return std::chrono::duration<double, std::micro>(time).count(); };
  const std::vector<int> tracks = tracks_of(events);
  json rows = json::array();
  std::set<std::pair<int, int>> named;
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    if (named.emplace(event.rank, tracks[i]).second) {
      rows.push_back(name_row("process_name", event.rank, tracks[i], "rank " + std::to_string(event.rank)));
      rows.push_back(name_row("thread_name", event.rank, tracks[i], track_name(tracks[i])));
    }
    if (event.kind == Kind::kCounts) {  // curves of their own
      rows.push_back({{"name", event.name},
                      {"ph", "C"},
                      {"pid", event.rank},
                      {"ts", us(event.start.time_since_epoch())},
                      {"args", std::map<std::string, int64_t>(event.counts.begin(), event.counts.end())}});
      continue;
    }
    json arguments{{"shapes", event.shapes}, {"async", event.async}};
    if (event.traffic) {
      arguments.update(traffic_json(*event.traffic));
      arguments["group_ranks"] = event.traffic->ranks;
    }
    rows.push_back({{"name", event.name},
                    {"ph", "X"},
                    {"pid", event.rank},
                    {"tid", tracks[i]},
                    {"ts", us(event.start.time_since_epoch())},
                    {"dur", us(event.end - event.start)},
                    {"args", std::move(arguments)}});
  }
  return json{{"traceEvents", rows}}.dump();
}

std::string merged_chrome_json(const std::vector<std::string>& documents) {
  json rows = json::array();
  for (const std::string& document : documents) {
    const json parsed = json::parse(document, nullptr, false);
    CHORALE_CHECK(parsed.is_object() && parsed.contains("traceEvents") && parsed["traceEvents"].is_array(),
                  "[trace] a document to merge has no list traceEvents");
    const json& more = parsed["traceEvents"];
    rows.insert(rows.end(), more.begin(), more.end());
  }
  return json{{"traceEvents", rows}}.dump();
}

std::string execution_json(const std::vector<Event>& events, int rank) {
  std::vector<const Event*> calls;
  for (const Event& event : events) {
    if (event.traffic && event.rank == rank) calls.push_back(&event);
  }
  std::stable_sort(calls.begin(), calls.end(), [](const Event* a, const Event* b) { return a->start < b->start; });
  json groups = json::array(), nodes = json::array();
  std::set<std::string> known;
  for (const Event* event : calls) {
    const Traffic& traffic = *event->traffic;
    if (!traffic.ranks.empty() && known.insert(traffic.group).second) {
      json node = group_json(traffic);
      node["name"] = "process_group:init";
      node["ranks"] = traffic.ranks;
      groups.push_back(std::move(node));
    }
    json node = traffic_json(traffic);
    node["name"] = event->name;
    nodes.push_back(std::move(node));
  }
  groups.insert(groups.end(), nodes.begin(), nodes.end());
  return json{{"rank", rank}, {"nodes", std::move(groups)}}.dump();
}

}  // namespace chorale::trace
