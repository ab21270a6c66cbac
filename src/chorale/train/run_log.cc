#include "chorale/train/run_log.h"

#include <fmt/chrono.h>

#include <cmath>
#include <optional>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/report/run.h"

namespace chorale::train {
namespace {

// What is in a line; nothing when it is damaged, or not whole.
std::optional<json::Object> line_in(const std::string& what, std::string_view text) {
  try {
    json::Value value = json::parse(what, text);
    const json::Value* step = json::find(value.object(what), "step");
    CHORALE_CHECK(step, what, " has no step");
    step->size("step");
    return std::move(*value.mutable_as<json::Object>());
  } catch (const InvalidArgument&) {
    return {};
  }
}

// Keeps the whole lines up to a step and returns the seconds of the last of them.
double drop_later_lines(const std::filesystem::path& path, int64_t step) {
  if (!std::filesystem::exists(path)) return 0;
  report::check_metrics_size(path);
  const auto file = io::MappedFile::open(path);
  std::string_view rest = file->text();
  std::string kept;
  double seconds = 0;
  size_t damaged = 0, first_damage = 0;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const bool is_whole = end != std::string_view::npos;
    const std::string_view text = rest.substr(0, is_whole ? end + 1 : rest.size());
    if (const auto line = is_whole ? line_in(path.string(), text.substr(0, end)) : std::nullopt; !line) {
      if (damaged++ == 0) first_damage = static_cast<size_t>(text.data() - file->text().data());
    } else if (json::find(*line, "step")->size("step") <= step) {
      kept += text;
      const json::Value* time = json::find(*line, "seconds");
      if (time && time->as<double>()) seconds = *time->as<double>();
      if (time && time->as<int64_t>()) seconds = static_cast<double>(*time->as<int64_t>());
    }
    rest.remove_prefix(text.size());
  }
  if (damaged > 0)
    log_warning(concat(path.string(), " had ", damaged, damaged == 1 ? " damaged line" : " damaged lines",
                       ", cut off at byte ", first_damage, "; the run goes on without ", damaged == 1 ? "it" : "them"));
  io::write_file(path, kept);
  return seconds;
}

}  // namespace

RunLog::RunLog(const std::filesystem::path& folder, int64_t step, json::Object start)
    : seconds_before_(drop_later_lines(folder / "metrics.jsonl", step)),
      file_(folder / "metrics.jsonl"),
      start_(std::chrono::steady_clock::now()),
      events_(folder, step > 0 ? step + 1 : 0) {
  const auto now = std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  start.emplace_back("time", json::Value(fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", now)));
  line("start", step, std::move(start));
}

double RunLog::seconds() const {
  return seconds_before_ + std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void RunLog::line(const char* kind, int64_t step, json::Object members) {
  members.insert(members.begin(), {{"kind", json::Value(std::string(kind))},
                                   {"step", json::Value(step)},
                                   {"seconds", json::Value(std::round(seconds() * 1000) / 1000)}});
  file_.add(json::write(members) + "\n");
  file_.flush();
}

void RunLog::numbers(const char* kind, int64_t step, const Metrics& metrics) {
  json::Object members;
  for (const auto& [name, value] : metrics) {
    members.emplace_back(name, json::Value(value));
    events_.number(step, concat(kind, "/", name), value);
  }
  line(kind, step, std::move(members));
  events_.flush();
}

void RunLog::rank(int64_t step, int rank, const Metrics& metrics) {
  json::Object members{{"rank", json::Value(int64_t{rank})}};
  for (const auto& [name, value] : metrics) members.emplace_back(name, json::Value(value));
  line("time", step, std::move(members));
}

void RunLog::add_lines(const std::string& lines) {
  file_.add(lines);
  file_.flush();
}

void RunLog::sample(int64_t step, const std::string& text) {
  line("sample", step, {{"text", json::Value(text)}});
  events_.text(step, "sample", text);
  events_.flush();
}

}  // namespace chorale::train
