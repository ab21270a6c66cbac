#include "chorale/app/bench/bench.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "chorale/app/bench/gpu.h"
#include "chorale/app/bench/gpu_losses.h"
#include "chorale/app/bench/guards.h"
#include "chorale/app/bench/recovery.h"
#include "chorale/app/commands.h"
#include "chorale/base/cpu.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/vec/target.h"

extern char** environ;

namespace chorale::app {

double seconds_of(const std::function<void()>& run, int64_t count) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t calibrate(const std::function<void()>& run, double target_seconds) {
  run();
  int64_t count = 1;
  double took = seconds_of(run, count);
  while (took < target_seconds / 4 && count < (int64_t{1} << 28)) took = seconds_of(run, count *= 2);
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(count) * target_seconds / std::max(took, 1e-9)));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib / 1024;
  }
  return 0;
}

PeerProcess::PeerProcess(const std::vector<std::string>& command) {
  int to[2], from[2];
  CHORALE_CHECK_STATE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0, "[bench] cannot make a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int error = posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(to[0]);
  close(from[1]);
  to_ = to[1];
  from_ = from[0];
  CHORALE_CHECK_STATE(error == 0, "[bench] cannot start ", command[0]);
  greeting_ = read_line();
}

PeerProcess::~PeerProcess() {
  close(to_);
  close(from_);
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
}

std::string PeerProcess::read_line() {
  while (true) {
    if (const size_t end = buffered_.find('\n'); end != std::string::npos) {
      const std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    char chunk[4096];
    const ssize_t got = read(from_, chunk, sizeof(chunk));
    CHORALE_CHECK_STATE(got > 0, "[bench] the peer ended without an answer");
    buffered_.append(chunk, static_cast<size_t>(got));
  }
}

std::string PeerProcess::ask(const std::string& line) {
  const std::string text = line + "\n";
  // A peer that died must not end us with a signal.
  struct sigaction ignore {
  }, before{};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  const bool sent = write(to_, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  sigaction(SIGPIPE, &before, nullptr);
  CHORALE_CHECK_STATE(sent, "[bench] the peer ended");
  return read_line();
}

namespace {

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::tm calendar{};
  gmtime_r(&now, &calendar);
  std::strftime(text, sizeof(text), "%Y-%m-%d", &calendar);
  return text;
}

std::filesystem::path repository() {
  // build/release/bin/chorale-bench
  return std::filesystem::path(program_path()).parent_path().parent_path().parent_path().parent_path();
}

std::string commit() {
  std::ifstream head(repository() / ".git" / "HEAD");
  std::string line;
  std::getline(head, line);
  if (!line.starts_with("ref: ")) return line.substr(0, 12);
  std::ifstream ref(repository() / ".git" / line.substr(5));
  std::getline(ref, line);
  return line.substr(0, 12);
}

}  // namespace

std::string program_path() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

std::string peers_folder() {
  const auto folder = repository() / "bench" / "peers";
  return std::filesystem::exists(folder) ? folder.string() : "";
}

void check_only(const std::string& only, const std::vector<std::string>& names) {
  if (std::any_of(names.begin(), names.end(), [&](const std::string& name) { return picks(only, name); })) return;
  std::string list;
  for (const std::string& name : names) list += "\n  " + name;
  throw InvalidArgument(concat("[bench] no case has '", only, "' (--only) in its name; there are:", list));
}

std::function<std::string(const std::string&)> one_of_peers(std::vector<std::string> known) {
  known.emplace_back("none");
  return [known = std::move(known)](const std::string& against) -> std::string {
    std::istringstream words(against);
    for (std::string word; std::getline(words, word, ',');) {
      const bool is_known = word.empty() || std::any_of(known.begin(), known.end(), [&](const std::string& name) {
                              return name.back() == '=' ? word.starts_with(name) : word == name;
                            });
      if (is_known) continue;
      std::string list;
      for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
      return concat("no peer is called '", word, "'; expected some of: ", list);
    }
    return "";
  };
}

nlohmann::json bench_report(const std::string& bench, const std::vector<BenchRow>& rows) {
  nlohmann::json report = {{"bench", bench},
                           {"machine",
                            {{"cpu", cpu_brand()},
                             {"cores", usable_cores()},
                             {"memory_gib", memory_room().total_bytes >> 30},
                             {"isa", vec::target_name()},
                             {"date", today()},
                             {"commit", commit()}}},
                           {"rows", nlohmann::json::array()}};
  for (const BenchRow& row : rows) {
    report["rows"].push_back({{"case", row.name},
                              {"unit", row.unit},
                              {"better", "lower"},
                              {"ours", row.ours},
                              {"peers", row.peers},
                              {"extra", row.extra}});
  }
  return report;
}

void write_json(const std::string& path, const nlohmann::json& report) {
  std::ofstream file(path);
  file << report.dump(1) << '\n';
  CHORALE_CHECK(file.good(), "[bench] cannot write ", path);
}

void add_bench(CLI::App& program, Work& work) {
  CLI::App* bench = program.add_subcommand("bench", "Measure, beside peers in the same run");
  bench->require_subcommand(1);
  add_bench_all(*bench, work);
  add_bench_collectives(*bench, work);
  add_bench_ops(*bench, work);
  add_bench_guards(*bench, work);
  add_bench_steps(*bench, work);
  add_bench_ddp(*bench, work);
  add_bench_sharded(*bench, work);
  add_bench_rpc(*bench, work);
  add_bench_gpu(*bench, work);
  add_bench_gpu_losses(*bench, work);
  add_bench_recovery(*bench, work);
}

}  // namespace chorale::app
