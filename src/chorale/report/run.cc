#include "chorale/report/run.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>

#include "chorale/base/error.h"
#include "chorale/base/printable.h"
#include "chorale/io/file.h"

namespace chorale::report {
namespace {

constexpr size_t kLongestLine = 1 << 20;
constexpr uint64_t kMostBytes = uint64_t{4} << 30;  // of lines: months of training
// Numbers of a program's own that are drawn: a page with more would be of no use.
constexpr size_t kMostOwn = 60;
// Fields of lines of training that go into other figures, or belong to one.
constexpr std::array<std::string_view, 3> kUsedFields = {"step_ms", "communication_ms", "exposed_communication_ms"};
constexpr size_t kMostProblems = 10;
constexpr size_t kMostEvents = 10'000;  // changes of ranks
constexpr size_t kMostPairs = 10'000;   // of workers that call each other: a page should not carry more

// A number, or nothing where the value is something else.
std::optional<double> plain_number(const json::Value& value) {
  if (const auto* real = value.as<double>()) return *real;
  if (const auto* whole = value.as<int64_t>()) return static_cast<double>(*whole);
  if (const auto* large = value.as<uint64_t>()) return static_cast<double>(*large);
  return std::nullopt;
}

double number(std::string_view what, const json::Object& line, std::string_view key) {
  const json::Value* value = json::find(line, key);
  if (!value || value->as<std::nullptr_t>()) return kMissing;
  if (const auto found = plain_number(*value)) return *found;
  throw InvalidArgument(concat(what, ": \"", key, "\" is ", value->kind(), ", expected a number"));
}

// The value of a field that must be there.
const json::Value& needed(std::string_view what, const json::Object& line, std::string_view key) {
  const json::Value* value = json::find(line, key);
  CHORALE_CHECK(value, what, ": no \"", key, "\"");
  return *value;
}
int64_t count(std::string_view what, const json::Object& line, std::string_view key) {
  return needed(what, line, key).size(concat(what, ": \"", key, "\""));
}

struct File {
  int descriptor;
  ~File() {
    if (descriptor >= 0) ::close(descriptor);
  }
};

}  // namespace

RunReader::RunReader(std::filesystem::path folder) : folder_(std::move(folder)) {
  std::error_code error;
  CHORALE_CHECK(std::filesystem::is_directory(folder_, error), "[report] ", folder_, " is no folder",
                error ? concat(" (", error.message(), ")") : "", "; name the folder of a run, such as runs/NAME");
  // "." and "runs/a/" have names too.
  const auto path = std::filesystem::weakly_canonical(folder_, error);
  run_.name = printable((path.has_filename() ? path : path.parent_path()).filename().string());
}

RunReader::Stamp RunReader::stamp_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  return {status.st_ino, static_cast<uint64_t>(status.st_size),
          status.st_mtim.tv_sec * int64_t{1'000'000'000} + status.st_mtim.tv_nsec};
}

void check_metrics_size(const std::filesystem::path& file) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(file, error);
  CHORALE_CHECK(error || bytes <= kMostBytes, file.string(), " has ", bytes, " bytes; at most ", kMostBytes,
                " are read. It is damaged, or not a run's: move it away");
}

template <class Take>
bool RunReader::read_whole(const char* name, Stamp& seen, std::string& problem, const Take& take) {
  const Stamp now = stamp_of(folder_ / name);
  if (now == seen) return false;
  seen = now;
  problem.clear();
  if (now == Stamp{}) return true;
  try {
    take(json::parse(name, io::MappedFile::open(folder_ / name)->text()));
  } catch (const Error& error) {
    problem = error.what();
  }
  return true;
}

bool RunReader::refresh() {
  bool changed = read_metrics();
  changed |= read_whole("config.json", config_, config_problem_,
                        [&](const json::Value& value) { run_.config = value.object("config.json"); });
  changed |= read_whole("evaluation.json", evaluation_, evaluation_problem_, [&](const json::Value& value) {
    run_.evaluation = evaluation_from_json("evaluation.json", value);
  });
  return changed;
}

std::vector<std::string> RunReader::problems() const {
  std::vector<std::string> all = metrics_problems_;
  if (const int64_t more = bad_lines_ - static_cast<int64_t>(all.size()); more > 0)
    all.push_back(concat("metrics.jsonl: ", more, " more lines like these"));
  for (const std::string& problem : {config_problem_, evaluation_problem_}) {
    if (!problem.empty()) all.push_back(problem);
  }
  return all;
}

bool RunReader::read_metrics() {
  const Stamp now = stamp_of(folder_ / "metrics.jsonl");
  if (now == metrics_) return false;
  if (now.file != metrics_.file || now.bytes < metrics_.bytes) {
    run_.start.clear();
    run_.train = Series(kTrainFields);
    run_.evaluations = Series(kEvaluationFields);
    run_.times.clear();
    run_.own.clear();
    run_.samples.clear();
    run_.events.clear();
    run_.calls.clear();
    run_.workers.clear();
    metrics_problems_.clear();
    torn_.clear();
    line_ = bad_lines_ = 0;
    metrics_.bytes = 0;
  }
  run_.updated = static_cast<double>(now.modified_ns) * 1e-9;
  const uint64_t start = metrics_.bytes;
  metrics_ = now;
  try {
    check_metrics_size(folder_ / "metrics.jsonl");
  } catch (const InvalidArgument& error) {
    bad_lines_ = 1;
    metrics_problems_ = {error.what()};
    return true;
  }
  // The file is not mapped: the trainer may cut it short when it resumes, which would end us.
  const File file{::open((folder_ / "metrics.jsonl").c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.descriptor < 0) return true;
  std::vector<char> buffer(1 << 16);
  uint64_t offset = start;
  while (offset < now.bytes) {
    const size_t wanted = std::min<uint64_t>(buffer.size(), now.bytes - offset);
    const ssize_t got = ::pread(file.descriptor, buffer.data(), wanted, static_cast<off_t>(offset));
    if (got <= 0) break;
    std::string_view rest(buffer.data(), static_cast<size_t>(got));
    offset += rest.size();
    for (size_t end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
      torn_ += rest.substr(0, end);
      rest.remove_prefix(end + 1);
      ++line_;
      read_line(torn_);
      torn_.clear();
      too_long_ = false;
    }
    torn_ += rest;
    if (torn_.size() > kLongestLine) {
      too_long_ = true;
      torn_.clear();
    }
  }
  metrics_.bytes = offset;
  return true;
}

void RunReader::read_line(std::string_view text) {
  const std::string what = concat("metrics.jsonl, line ", line_);
  try {
    CHORALE_CHECK(!too_long_ && text.size() <= kLongestLine, what, ": longer than ", kLongestLine, " characters");
    const json::Value value = json::parse(what, text, {.bytes = kLongestLine, .depth = 16});
    take_line(what, value.object(what));
  } catch (const Error& error) {
    ++bad_lines_;
    if (metrics_problems_.size() < kMostProblems) metrics_problems_.emplace_back(error.what());
  }
}

void RunReader::take_line(std::string_view what, const json::Object& line) {
  const std::string& kind = needed(what, line, "kind").string(concat(what, ": \"kind\""));
  const auto row_of = [&](auto fields) {
    std::vector<double> row = {static_cast<double>(count(what, line, "step"))};
    for (std::string_view field : std::span(fields).subspan(1)) row.push_back(number(what, line, field));
    return row;
  };
  if (kind == "start") {
    run_.start.clear();
    for (const auto& [name, value] : line) {
      if (name != "kind" && name != "step" && name != "seconds") run_.start.emplace_back(name, value);
    }
  } else if (kind == "train") {
    std::vector<double> row = row_of(kTrainFields);
    const size_t waiting = row.size() - 1, rate = row.size() - 2;
    const double share = number(what, line, "exposed_communication_ms") / number(what, line, "step_ms");
    row[waiting] = share > 1 ? 1 : share;
    for (const auto& [name, value] : line) {
      constexpr std::string_view kSuffix = "_per_second";
      if (!name.ends_with(kSuffix)) continue;
      row[rate] = number(what, line, name);
      run_.rate_unit = name.substr(0, name.size() - kSuffix.size()) + "/s";
    }
    run_.train.add(row);
    take_own_numbers("", line);
  } else if (kind == "evaluation") {
    run_.evaluations.add(row_of(kEvaluationFields));
    take_own_numbers("", line);
  } else if (kind == "time") {
    run_.times.try_emplace(count(what, line, "rank"), kTimeFields).first->second.add(row_of(kTimeFields));
  } else if (kind == "sample") {
    Sample sample{count(what, line, "step"), needed(what, line, "text").string(concat(what, ": \"text\""))};
    std::erase_if(run_.samples, [&](const Sample& old) { return old.step >= sample.step; });
    run_.samples.push_back(std::move(sample));
  } else if (kind == "event") {
    const json::Value* repeated = json::find(line, "repeated");
    const bool* is_repeated = repeated ? repeated->as<bool>() : nullptr;
    if (run_.events.size() < kMostEvents)
      run_.events.push_back({count(what, line, "step"), needed(what, line, "cause").string(concat(what, ": \"cause\"")),
                             number(what, line, "ranks"), number(what, line, "cost_ms"), is_repeated && *is_repeated});
  } else if (kind == "calls" || kind == "worker") {
    const auto name = [&](std::string_view key) {
      return needed(what, line, key).string(concat(what, ": \"", key, "\""));
    };
    const auto figures_of = [&](auto fields) {
      std::vector<double> figures;
      figures.reserve(fields.size());
      for (std::string_view field : fields) figures.push_back(number(what, line, field));
      return figures;
    };
    CHORALE_CHECK(run_.calls.size() + run_.workers.size() < kMostPairs, what, ": more than ", kMostPairs,
                  " workers and pairs of workers");
    if (kind == "calls") {
      run_.calls[{name("from"), name("to")}] = figures_of(kCallFields);
    } else {
      run_.workers[name("name")] = figures_of(kWorkerFields);
    }
  } else {
    take_own_numbers(kind + ": ", line);
  }
}

void RunReader::take_own_numbers(const std::string& prefix, const json::Object& line) {
  const json::Value* found_step = json::find(line, "step");
  const json::Value* found_seconds = json::find(line, "seconds");
  const std::optional<double> step = found_step ? plain_number(*found_step) : std::nullopt;
  if (!step) return;
  const double seconds = found_seconds ? plain_number(*found_seconds).value_or(kMissing) : kMissing;
  for (const auto& [name, value] : line) {
    const auto is_known = [&name = name](const auto& fields) {
      return std::find(fields.begin(), fields.end(), name) != fields.end();
    };
    const std::optional<double> number = plain_number(value);
    if (!number || is_known(kTrainFields) || is_known(kEvaluationFields) || is_known(kUsedFields)) continue;
    if (prefix.empty() && name.ends_with("_per_second")) continue;
    const std::string title = prefix + name;
    if (run_.own.size() >= kMostOwn && !run_.own.contains(title)) continue;
    run_.own.try_emplace(title, kOwnFields).first->second.add(std::array{*step, seconds, *number});
  }
}

}  // namespace chorale::report
