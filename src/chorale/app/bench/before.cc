#include "chorale/app/bench/before.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "chorale/base/error.h"

extern char** environ;

namespace chorale::app {
namespace {

// What a change may cost: on the average, and in one case. Repeated runs of one program differ by less than that on a
// quiet machine.
constexpr double kMostOnAverage = 1.03, kMostInOneCase = 1.10;

// The words of this process behind "bench", without --against and --json.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  bool behind = false;
  for (std::string word; std::getline(file, word, '\0');) {
    if (!behind) {
      behind = word == "bench";
    } else if (word == "--against" || word == "--json") {
      std::getline(file, word, '\0');
    } else if (!word.starts_with("--against=") && !word.starts_with("--json=")) {
      words.push_back(word);
    }
  }
  return words;
}

nlohmann::json report_by(const std::string& program, std::vector<std::string> words, const std::string& file) {
  words.insert(words.begin(), {program, "bench"});
  for (const char* word : {"--against", "none", "--json"}) words.emplace_back(word);
  words.push_back(file);
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  CHORALE_CHECK_STATE(error == 0, "[bench] cannot start ", program, "; before= takes the path of a chorale program");
  int status = 0;
  waitpid(pid, &status, 0);
  CHORALE_CHECK_STATE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "[bench] ", program, " failed with status ",
                      status);
  std::ifstream written(file);
  return nlohmann::json::parse(written);
}

// Name → figures, in the order of the first report.
struct Figures {
  std::vector<std::string> names;
  std::map<std::string, std::vector<double>> values;
  std::map<std::string, std::string> units;

  explicit Figures(const std::vector<nlohmann::json>& reports) {
    for (const nlohmann::json& report : reports) {
      for (const nlohmann::json& row : report.at("rows")) {
        const std::string name = row.at("case");
        if (!values.contains(name)) names.push_back(name);
        values[name].push_back(row.at("ours"));
        units[name] = row.at("unit");
      }
    }
  }
};

}  // namespace

std::string before_program(const std::string& against) {
  constexpr std::string_view kWord = "before=";
  const size_t at = against.find(kWord);
  if (at == std::string::npos) return "";
  return against.substr(at + kWord.size(), against.find(',', at) - at - kWord.size());
}

std::vector<BenchRow> compared(const std::vector<nlohmann::json>& now, const std::vector<nlohmann::json>& before) {
  const Figures ours(now), theirs(before);
  std::vector<BenchRow> rows;
  for (const std::string& name : ours.names) {
    const auto then = theirs.values.find(name);
    if (then == theirs.values.end()) continue;
    rows.push_back({.name = name,
                    .unit = ours.units.at(name),
                    .ours = median(ours.values.at(name)),
                    .peers = {{"before", median(then->second)}}});
  }
  return rows;
}

void compare_with_before(const std::string& bench, const std::string& program, const std::string& json, int rounds) {
  const std::string own = std::filesystem::path(program_path()).parent_path() / "chorale";
  char folder[] = "/tmp/chorale-bench-XXXXXX";
  CHORALE_CHECK_STATE(mkdtemp(folder), "[bench] cannot make a folder in /tmp");
  std::vector<std::string> words = own_words();
  const bool says_rounds =
      std::any_of(words.begin(), words.end(), [](const std::string& word) { return word.starts_with("--rounds"); });
  if (rounds > 0 && !says_rounds) words.push_back(fmt::format("--rounds={}", rounds));
  std::vector<nlohmann::json> now, before;
  for (int run = 0; run < kRunsOfEach; ++run) {
    fmt::print(stderr, "run {} of {}\n", run + 1, kRunsOfEach);
    before.push_back(report_by(program, words, std::string(folder) + "/before.json"));
    now.push_back(report_by(own, words, std::string(folder) + "/now.json"));
  }
  std::filesystem::remove_all(folder);
  report_comparison(bench, compared(now, before), json);
}

void report_comparison(const std::string& bench, const std::vector<BenchRow>& rows, const std::string& json) {
  CHORALE_CHECK_STATE(!rows.empty(), "[bench] the two programs have no case in common");
  double logs = 0, worst = 0;
  std::string slower;
  fmt::print("{:<52} {:>12} {:>12} {:>7}\n", "case", "before", "now", "ratio");
  for (const BenchRow& row : rows) {
    const double then = row.peers.at("before"), ratio = row.ours / then;
    logs += std::log(ratio);
    worst = std::max(worst, ratio);
    fmt::print("{:<52} {:>12.4g} {:>12.4g} {:>7.3f} {}\n", row.name, then, row.ours, ratio, row.unit);
    if (ratio > kMostInOneCase) slower += fmt::format("  {} takes {:.3f} of the time before\n", row.name, ratio);
  }
  const double mean = std::exp(logs / static_cast<double>(rows.size()));
  fmt::print("now over before, geometric mean of {} cases: {:.3f} ({}); worst {:.3f} ({})\n{}", rows.size(), mean,
             mean <= kMostOnAverage ? "within 3 %" : "MORE than 3 % slower", worst,
             worst <= kMostInOneCase ? "within 10 %" : "MORE than 10 % slower", slower);
  if (!json.empty()) write_json(json, bench_report(bench, rows));
}

}  // namespace chorale::app
