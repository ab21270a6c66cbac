// `chorale bench all`: the figures of the README. Runs the other benchmarks, one after the other, and makes one table.
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "chorale/app/bench/bench.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace bench_all {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Options {
  std::string against = "torch,mpi", python = "python3", json;
  bool markdown = false;
  int rounds = 5;
};

std::string quoted(const std::string& text) { return "'" + text + "'"; }

// The report of `chorale bench ARGUMENTS`; its own table goes to standard error, where one sees that it goes on.
json report_of(const std::string& arguments, const Options& options, const fs::path& folder) {
  const fs::path file = folder / "report.json";
  const std::string command =
      fmt::format("{} bench {} --rounds {} --torch-python {} --json {} 1>&2", quoted(program_path()), arguments,
                  options.rounds, quoted(options.python), quoted(file.string()));
  std::cerr << "== chorale bench " << arguments << std::endl;
  CHORALE_CHECK_STATE(std::system(command.c_str()) == 0, "[bench] this failed: ", command);
  return json::parse(std::ifstream(file));
}

// Bytes of all files below a folder.
double folder_mib(const fs::path& folder) {
  uintmax_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && !entry.is_symlink()) bytes += entry.file_size();
  }
  return static_cast<double>(bytes) / (1 << 20);
}

// Where PyTorch is installed; empty when there is none.
std::string torch_folder(const std::string& python) {
  const std::string command = quoted(python) + " -c 'import torch; print(torch.__path__[0])' 2>/dev/null";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return {};
  std::array<char, 4096> line{};
  const bool any = std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr;
  pclose(pipe);
  const std::string text = any ? line.data() : "";
  return text.substr(0, text.find('\n'));
}

struct Line {
  std::string what;
  std::string unit;
  double ours = 0;
  std::map<std::string, double> peers;  // torch, mpi
};

std::string size_name(const std::string& bytes) {
  const double n = std::stod(bytes);
  return n >= 1 << 20 ? fmt::format("{:.0f} MiB", n / (1 << 20))
         : n >= 1024  ? fmt::format("{:.0f} KiB", n / 1024)
                      : bytes + " B";
}

std::map<std::string, double> peers_of(const json& row) {
  std::map<std::string, double> peers = row["peers"].get<std::map<std::string, double>>();
  // The faster of PyTorch's two ways.
  if (const auto compiled = peers.find("compiled"); compiled != peers.end()) {
    peers["torch"] = peers.contains("torch") ? std::min(peers["torch"], compiled->second) : compiled->second;
  }
  return peers;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == '/') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

void add_collectives(const json& report, std::vector<Line>& lines) {
  std::map<double, Line> by_size;  // the report is in the order of names
  for (const json& row : report["rows"]) {
    const auto name = split(row["case"].get<std::string>());
    if (name[0] != "all_reduce" || name.back() != "registered") continue;
    by_size[std::stod(name[2])] = {fmt::format("all-reduce of {}, 2 ranks", size_name(name[2])), "us", row["ours"],
                                   peers_of(row)};
  }
  for (auto& entry : by_size) lines.push_back(std::move(entry.second));
}

void add_steps(const json& report, std::vector<Line>& lines) {
  for (const json& row : report["rows"]) {
    const auto name = split(row["case"].get<std::string>());
    if (name.back() != "t1") continue;  // bf16 and other variants are in `bench steps`
    lines.push_back({fmt::format("training step, {}, one core", name[0]), "ms", row["ours"], peers_of(row)});
  }
  for (const json& row : report["rows"]) {
    if (row["case"] != "tinymlp/local/n1/t1") continue;
    const json& extra = row["extra"];
    const auto add = [&](const char* what, const char* unit, const char* field) {
      Line line{what, unit, extra[field], {}};
      const std::string theirs = fmt::format("torch_{}", field);
      if (extra.contains(theirs)) line.peers["torch"] = extra[theirs];
      lines.push_back(std::move(line));
    };
    add("start to the first step, tinymlp", "ms", "first_ms");
    add("peak memory, tinymlp", "MiB", "peak_mib");
  }
}

void add_ddp(const json& report, std::vector<Line>& lines) {
  for (const json& row : report["rows"]) {
    const auto name = split(row["case"].get<std::string>());
    lines.push_back({fmt::format("data-parallel step, {}, 2 ranks", name[0]), "ms", row["ours"], peers_of(row)});
  }
}

std::string number(double value) {
  return value < 1     ? fmt::format("{:.3f}", value)
         : value < 100 ? fmt::format("{:.1f}", value)
                       : fmt::format("{:.0f}", value);
}

std::string cell(const Line& line, const std::string& peer) {
  const auto found = line.peers.find(peer);
  if (found == line.peers.end()) return "";
  return fmt::format("{} ({}x)", number(found->second), number(found->second / line.ours));
}

void print(const std::vector<Line>& lines, const json& machine, bool markdown) {
  const char* row = markdown ? "| {} | {} | {} | {} | {} |\n" : "{:<48} {:>5} {:>10} {:>20} {:>20}\n";
  const auto emit = [&](const std::string& a, const std::string& b, const std::string& c, const std::string& d,
                        const std::string& e) { fmt::print(fmt::runtime(row), a, b, c, d, e); };
  emit("", "unit", "Chorale", "PyTorch (ratio)", "Open MPI (ratio)");
  if (markdown) fmt::print("|---|---|---:|---:|---:|\n");
  for (const Line& line : lines) emit(line.what, line.unit, number(line.ours), cell(line, "torch"), cell(line, "mpi"));
  fmt::print("\n{}, {} cores, {} GiB, {}, commit {}. Less is better; a ratio above 1 says that Chorale is ahead.\n",
             machine["cpu"].get<std::string>(), machine["cores"].get<int>(), machine["memory_gib"].get<int64_t>(),
             machine["date"].get<std::string>(), machine["commit"].get<std::string>());
}

void run(const Options& options) {
  const bool torch = options.against.find("torch") != std::string::npos;
  const bool mpi = options.against.find("mpi") != std::string::npos;
  const fs::path folder = fs::temp_directory_path() / fmt::format("chorale-bench-all-{}", getpid());
  fs::create_directories(folder);
  const std::string peers = fmt::format("{}{}{}", torch ? "torch" : "", torch && mpi ? "," : "", mpi ? "mpi" : "");
  const json collectives =
      report_of(fmt::format("collectives -n 2 --only all_reduce --against '{}'", peers), options, folder);
  const json steps = report_of(fmt::format("steps --against '{}'", torch ? "torch,compiled" : ""), options, folder);
  const json ddp = report_of(fmt::format("ddp -n 2 --against '{}'", torch ? "torch" : "none"), options, folder);
  fs::remove_all(folder);
  std::vector<Line> lines;
  add_collectives(collectives, lines);
  add_steps(steps, lines);
  add_ddp(ddp, lines);
  Line size{"installed size (ours: the program, all of it)",
            "MiB",
            static_cast<double>(fs::file_size(fs::path(program_path()).parent_path() / "chorale")) / (1 << 20),
            {}};
  const std::string installed = torch ? torch_folder(options.python) : "";
  if (!installed.empty()) size.peers["torch"] = folder_mib(installed);
  lines.push_back(std::move(size));
  print(lines, steps["machine"], options.markdown);
  if (!options.json.empty()) {
    write_json(options.json, {{"bench", "all"}, {"collectives", collectives}, {"steps", steps}, {"ddp", ddp}});
  }
}

}  // namespace
}  // namespace bench_all

void add_bench_all(CLI::App& bench, Work& work) {
  using namespace bench_all;
  CLI::App* command = bench.add_subcommand("all", "Collectives, steps and data-parallel steps in one table");
  auto options = std::make_shared<Options>();
  command->add_option("--against", options->against, "peers, among torch and mpi")
      ->check(one_of_peers({"torch", "mpi"}))
      ->capture_default_str();
  command->add_flag("--markdown", options->markdown, "the table as Markdown");
  command->add_option("--json", options->json, "write all reports to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--rounds", options->rounds, "turns of each side; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
