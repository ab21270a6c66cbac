// `chorale bench rpc`: calls, remote references and distributed autograd between two processes, beside PyTorch's and
// the floor: what handing over a cache line and copying the bytes once would cost. Or between two hosts, beside a bare
// socket and the fabric's own speed. The ranks are this program again, started with --as-rank.
#include "chorale/app/bench/rpc.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/hosts.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace bench_rpc {
namespace {

struct Options {
  int rounds = 3, hosts = 1;
  double seconds = 1;
  std::string against = "torch", fabric = "tls", json, only, python = "python3";
  RpcRank rank{.rank = -1, .store = {}, .only = {}, .seconds = 1, .address = {}};
};

struct Figures {
  std::vector<double> p50, p99, floor, torch;
};
using Table = std::map<std::string, Figures>;

void measure_ours(const Options& options, const TwoHosts* hosts, const std::filesystem::path& folder, int round,
                  Table& table) {
  std::string command = "{ export WORLD_SIZE=2;";
  if (hosts) {
    for (const std::string& variable : TwoHosts::variables(folder, options.fabric))
      command += fmt::format(" export '{}';", variable);
  }
  for (const int rank : {1, 0}) {
    if (hosts) command += " " + hosts->prefix(rank);
    command += fmt::format(" env RANK={} '{}' bench rpc --as-rank {} --store '{}' --only '{}' --seconds {}{}{}", rank,
                           program_path(), rank, (folder / fmt::format("store{}", round)).string(), options.only,
                           options.seconds, hosts ? " --address " + TwoHosts::address(0) : "", rank > 0 ? " &" : "; }");
  }
  FILE* pipe = popen(command.c_str(), "r");
  CHORALE_CHECK_STATE(pipe, "[bench] cannot start the ranks");
  std::string text;
  for (int c; (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  CHORALE_CHECK_STATE(pclose(pipe) == 0, "[bench] a rank failed; run one case with --only to see why");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t name_end = line.find('\t');
    if (name_end == std::string::npos) continue;
    std::istringstream fields(line.substr(name_end));
    double p50 = 0, p99 = 0, floor = 0;
    if (!(fields >> p50 >> p99 >> floor)) continue;
    Figures& figures = table[line.substr(0, name_end)];
    figures.p50.push_back(p50);
    figures.p99.push_back(p99);
    figures.floor.push_back(floor);
  }
}

// False when PyTorch cannot be measured.
bool measure_torch(const Options& options, const std::filesystem::path& folder, Table& table) {
  const std::string file = folder / "torch.json", sources = peers_folder();
  const std::string command =
      fmt::format("OMP_NUM_THREADS=1 '{}' '{}/torch_rpc.py' --seconds {} --json '{}' >/dev/null 2>&1", options.python,
                  sources, options.seconds, file);
  if (sources.empty() || std::system(command.c_str()) != 0) {
    fmt::print(
        "(PyTorch is not measured: this failed: {}; --torch-python names another Python. Its figures below were "
        "measured once, on a quiet machine)\n",
        command);
    return false;
  }
  const auto rows = nlohmann::json::parse(std::ifstream(file)).get<std::map<std::string, double>>();
  for (const auto& [name, us] : rows) table[name].torch.push_back(us);
  return true;
}

// What a row is held to (docs/dev/bench.md), and whether it holds; empty when there is nothing to hold it to.
struct Verdict {
  bool holds = true;
  std::string bar;
};
Verdict judge(const RpcCase& c, const BenchRow& row, bool hosts) {
  const double over_floor = row.ours / row.extra["floor_us"].get<double>();
  if (hosts && c.bytes == 4) return {over_floor <= 2.5, "at most 2.5 of a bare socket"};
  if (hosts && c.bytes == 64 << 20) return {over_floor <= 1.15, "at most 1.15 of the fabric"};
  const auto torch = row.peers.find("torch");
  if (torch == row.peers.end()) return {};
  return {torch->second / row.ours >= c.at_least, fmt::format("at least {}x", c.at_least)};
}

void report(const Options& options, const Table& table) {
  const bool hosts = options.hosts == 2, with_torch = !hosts && options.against.find("torch") != std::string::npos;
  fmt::print("\n{:<26} {:>12} {:>12} {:>12} {:>8} {:>12} {:>8}  {}\n", "case", "p50 us", "p99 us", "floor us", "ratio",
             "PyTorch us", "ratio", "bar");
  std::vector<BenchRow> rows;
  int reached = 0, missed = 0;
  for (const RpcCase& c : rpc_cases()) {
    const auto found = table.find(c.name);
    if (found == table.end() || found->second.p50.empty()) continue;
    const Figures& figures = found->second;
    BenchRow row{.name = c.name, .unit = "us", .ours = median(figures.p50), .peers = {}};
    row.extra = {{"p99", median(figures.p99)}, {"floor_us", median(figures.floor)}};
    std::string peer = fmt::format("{:>12} {:>8}", "-", "-");
    if (with_torch) {
      const bool measured = !figures.torch.empty();
      row.peers["torch"] = measured ? median(figures.torch) : c.torch_us;
      row.extra["torch_measured"] = measured;
      peer = fmt::format("{:>12.1f} {:>7.1f}x", row.peers["torch"], row.peers["torch"] / row.ours);
    }
    const Verdict verdict = judge(c, row, hosts);
    if (!verdict.bar.empty()) ++(verdict.holds ? reached : missed);
    fmt::print("{:<26} {:>12.2f} {:>12.2f} {:>12.2f} {:>7.2f}x {}  {}{}\n", row.name, row.ours, median(figures.p99),
               median(figures.floor), row.ours / median(figures.floor), peer,
               verdict.holds ? "" : "MISSED: ", verdict.bar);
    rows.push_back(std::move(row));
  }
  CHORALE_CHECK_STATE(!rows.empty(), "[bench] the ranks gave no figures; run one case with --only to see why");
  fmt::print("\nbars (docs/dev/bench.md): {} reached, {} missed\n", reached, missed);
  if (!options.json.empty()) write_json(options.json, bench_report("rpc", rows));
}

void run(const Options& options) {
  if (options.rank.rank >= 0) {
    RpcRank rank = options.rank;
    rank.only = options.only;
    rank.seconds = options.seconds;
    return run_rpc_rank(rank);
  }
  std::vector<std::string> names;
  for (const RpcCase& c : rpc_cases()) names.emplace_back(c.name);
  check_only(options.only, names);
  char name[] = "/tmp/chorale-bench-XXXXXX";
  CHORALE_CHECK_STATE(mkdtemp(name), "[bench] cannot make a folder in /tmp");
  const std::filesystem::path folder = name;
  std::optional<TwoHosts> cable;
  if (options.hosts == 2) cable.emplace();
  Table table;
  bool torch = options.against.find("torch") != std::string::npos && !cable;
  for (int round = 0; round < options.rounds; ++round) {
    measure_ours(options, cable ? &*cable : nullptr, folder, round, table);
    torch = torch && measure_torch(options, folder, table);
  }
  std::filesystem::remove_all(folder);
  report(options, table);
}

}  // namespace
}  // namespace bench_rpc

void add_bench_rpc(CLI::App& bench, Work& work) {
  using namespace bench_rpc;
  CLI::App* command = bench.add_subcommand(
      "rpc", "Calls, remote references and distributed autograd between two processes, beside PyTorch's");
  auto options = std::make_shared<Options>();
  command->add_option("--hosts", options->hosts, "2: two network namespaces with a cable, beside a bare socket")
      ->capture_default_str()
      ->check(between(1, 2));
  command->add_option("--fabric", options->fabric, "between hosts: tls, or ucx[:DEVICE]")->capture_default_str();
  command->add_option("--against", options->against, "peers: torch, or none")
      ->check(one_of_peers({"torch"}))
      ->capture_default_str();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name, such as call/add/4096");
  command->add_option("--rounds", options->rounds, "measurements of each, in turns; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command->add_option("--seconds", options->seconds, "for each case in a round")
      ->capture_default_str()
      ->check(between(0.001, 1e6));
  command->add_option("--as-rank", options->rank.rank, "")->group("");
  command->add_option("--store", options->rank.store, "")->group("");
  command->add_option("--address", options->rank.address, "")->group("");
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
