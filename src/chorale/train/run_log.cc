#include "chorale/train/run_log.h"

#include <fmt/chrono.h>

#include <cmath>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"

namespace chorale::train {
namespace {

// Keeps the lines up to a step and returns the seconds of the last of them. A last line that is cut off, since the
// process was killed, is dropped too.
double drop_later_lines(const std::filesystem::path& path, int64_t step) {
  if (!std::filesystem::exists(path)) return 0;
  const auto file = io::MappedFile::open(path);
  std::string_view rest = file->text();
  std::string kept;
  double seconds = 0;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    if (end == std::string_view::npos) break;
    const json::Value value = json::parse(path.string(), rest.substr(0, end));
    const json::Object& line = value.object(path.string());
    const json::Value* at = json::find(line, "step");
    if (at && at->size("step") <= step) {
      kept += rest.substr(0, end + 1);
      const json::Value* time = json::find(line, "seconds");
      if (time && time->as<double>()) seconds = *time->as<double>();
      if (time && time->as<int64_t>()) seconds = static_cast<double>(*time->as<int64_t>());
    }
    rest.remove_prefix(end + 1);
  }
  io::write_file(path, kept);
  return seconds;
}

}  // namespace

RunLog::RunLog(const std::filesystem::path& folder, int64_t step, json::Object start)
    : seconds_before_(drop_later_lines(folder / "metrics.jsonl", step)),
      start_(std::chrono::steady_clock::now()),
      events_(folder, step > 0 ? step + 1 : 0) {
  const std::filesystem::path path = folder / "metrics.jsonl";
  file_.reset(std::fopen(path.c_str(), "ae"));
  CHORALE_CHECK(file_, "cannot write ", path, ": ", std::strerror(errno));
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
  const std::string text = json::write(members) + "\n";
  std::fwrite(text.data(), 1, text.size(), file_.get());
  std::fflush(file_.get());
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

void RunLog::sample(int64_t step, const std::string& text) {
  line("sample", step, {{"text", json::Value(text)}});
  events_.text(step, "sample", text);
  events_.flush();
}

}  // namespace chorale::train
