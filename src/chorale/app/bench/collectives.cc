// `chorale bench collectives`: processes of one host, beside the floor of shared memory, PyTorch over gloo and Open
// MPI, in turns; or of two hosts, beside PyTorch over gloo; or, with --busy, beside PyTorch over gloo and programs that
// use every core. The ranks are this program again, started with --as-rank.
#include "chorale/app/bench/collectives.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>

#include "chorale/app/bench/before.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/busy.h"
#include "chorale/app/bench/hosts.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace bench_collectives {
namespace {

struct Options {
  int ranks = 2, hosts = 1;
  std::string fabric = "tls";
  std::optional<int> rounds{};
  bool busy = false;
  int round_count() const { return rounds.value_or(busy ? 5 : 3); }
  std::string against = "floor,torch,mpi";
  std::string json, only;
  std::string python = "python3";
  int64_t most_bytes = int64_t{64} << 20;
  // What a rank of the benchmark is told.
  int as_rank = -1;
  std::string store;
};

struct Figures {
  std::vector<double> p50, p99;
  int64_t wrong = 0;
};
using Table = std::map<std::string, Figures>;  // by case, without the last part for peers

// The lines that a command prints; empty when it fails.
std::vector<std::string> lines_of(const std::string& command) {
  std::vector<std::string> lines;
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (!pipe) return {};
  std::string line;
  for (int c; (c = std::fgetc(pipe)) != EOF;) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    lines.push_back(std::move(line));
    line.clear();
  }
  return pclose(pipe) == 0 ? lines : std::vector<std::string>();
}

std::string quoted(const std::string& word) { return "'" + word + "'"; }

// The first half of the ranks is on the first host.
int host_of(const Options& options, int rank) { return rank * 2 / options.ranks; }

// The ranks of ours: all but rank 0 in the background of a shell that waits for them.
void measure_ours(const Options& options, const TwoHosts* hosts, const std::filesystem::path& folder, int round,
                  Table& table) {
  const std::string program = program_path();
  const std::string store = (folder / fmt::format("store{}", round)).string();
  std::string command = fmt::format("export WORLD_SIZE={};", options.ranks);
  if (hosts) {
    for (const std::string& variable : TwoHosts::variables(folder, options.fabric))
      command += fmt::format(" export {};", quoted(variable));
  }
  for (int rank = options.ranks - 1; rank >= 0; --rank) {
    if (hosts) command += " " + hosts->prefix(host_of(options, rank));
    command += fmt::format(" {} bench collectives -n {} --as-rank {} --store {} --only {} --most-bytes {}{}{}",
                           quoted(program), options.ranks, rank, quoted(store), quoted(options.only),
                           options.most_bytes, options.busy ? " --busy" : "", rank > 0 ? " &" : "");
  }
  for (const std::string& line : lines_of("{ " + command + "; }")) {
    std::istringstream fields(line);
    std::string name;
    int64_t bytes = 0, wrong = 0;
    double p50 = 0, p99 = 0;
    if (!(fields >> name >> bytes >> p50 >> p99 >> wrong)) continue;
    table[name].p50.push_back(p50);
    table[name].p99.push_back(p99);
    table[name].wrong += wrong;
  }
}

// Peers print "NAME BYTES B  p50 X us …".
void measure_peer(const std::string& command, const Options& options, const char* op_of_floor, Table& table) {
  for (const std::string& line : lines_of(command)) {
    std::istringstream fields(line);
    std::string op, unit, word;
    int64_t bytes = 0;
    double p50 = 0;
    if (!(fields >> op >> bytes >> unit >> word >> p50) || word != "p50") continue;
    if (op == "floor") op = op_of_floor;
    table[fmt::format("{}/f32/{}/n{}", op, bytes, options.ranks)].p50.push_back(p50);
  }
}

struct Peer {
  std::string name;
  std::string command;
  std::string build;  // how to make it; empty: nothing to do
};

// Which collectives PyTorch measures: the one that is asked for, or all.
std::string torch_options(const Options& options) {
  const std::string op = options.only.substr(0, options.only.find('/'));
  if (op.size() == options.only.size()) return fmt::format("--max-bytes {}", options.most_bytes);
  return fmt::format("--max-bytes {} --op {} --only {}", options.most_bytes, quoted(op), quoted(options.only));
}

// PyTorch's ranks, each on its host.
std::string torch_on_hosts(const Options& options, const TwoHosts& hosts, const std::string& script) {
  std::string command = "{ export OMP_NUM_THREADS=1;";
  for (int rank = options.ranks - 1; rank >= 0; --rank) {
    command +=
        fmt::format(" {} {} {} {} {} --rank {} --address {} --interface {}{}", hosts.prefix(host_of(options, rank)),
                    quoted(options.python), quoted(script), options.ranks, torch_options(options), rank,
                    TwoHosts::address(0), TwoHosts::kInterface, rank > 0 ? " &" : ";");
  }
  return command + " }";
}

std::vector<Peer> find_peers(const Options& options, const TwoHosts* hosts, const std::filesystem::path& folder) {
  const std::string sources = peers_folder();
  std::vector<Peer> peers;
  if (sources.empty()) {
    fmt::print("peers: left out, bench/peers is not beside this program\n");
    return peers;
  }
  const auto wanted = [&](const std::string& name) {
    return options.against.find(name) != std::string::npos && (!hosts || name == "torch");
  };
  const auto target = [&](const char* name) { return quoted((folder / name).string()); };
  if (wanted("floor"))
    peers.push_back({"floor", fmt::format("{} {}", target("floor"), options.ranks),
                     fmt::format("g++ -O3 -march=native {} -o {}", quoted(sources + "/floor.cc"), target("floor"))});
  if (wanted("mpi"))
    peers.push_back({"mpi",
                     fmt::format("mpirun --allow-run-as-root --oversubscribe -n {} {}", options.ranks, target("mpi")),
                     fmt::format("mpicxx -O2 {} -o {}", quoted(sources + "/mpi_all_reduce.cc"), target("mpi"))});
  if (wanted("torch"))
    peers.push_back(
        {"torch",
         hosts ? torch_on_hosts(options, *hosts, sources + "/torch_collectives.py")
               : fmt::format("OMP_NUM_THREADS=1 {} {} {} {}", quoted(options.python),
                             quoted(sources + "/torch_collectives.py"), options.ranks, torch_options(options)),
         fmt::format("{} -c 'import torch.distributed'", quoted(options.python))});
  std::erase_if(peers, [](const Peer& peer) {
    const bool ready = std::system((peer.build + " >/dev/null 2>&1").c_str()) == 0;
    if (!ready) fmt::print("{}: left out, this failed: {}\n", peer.name, peer.build);
    return !ready;
  });
  return peers;
}

// Bytes on the wire per byte of the algorithm, as nccl-tests count them.
double bus_factor(const std::string& op, int ranks) {
  const double n = ranks;
  if (op == "all_reduce") return 2 * (n - 1) / n;
  if (op == "all_gather" || op == "reduce_scatter" || op == "all_to_all") return (n - 1) / n;
  return 1;
}

void report(const Options& options, const Table& ours, const std::map<std::string, Table>& peers) {
  fmt::print("\n{:<40} {:>12} {:>10} {:>10} {:>8} {:>8} {:>6}", "case", "count", "p50 us", "p99 us", "algbw", "busbw",
             "wrong");
  for (const auto& [name, table] : peers) fmt::print(" {:>18}", name);
  fmt::print("\n");
  std::vector<BenchRow> rows;
  for (const auto& [name, figures] : ours) {
    BenchRow row{.name = name, .unit = "us", .ours = median(figures.p50), .peers = {}};
    const std::string shared = name.substr(0, name.rfind('/')), op = name.substr(0, name.find('/'));
    const int64_t bytes = std::stoll(name.substr(name.find("f32/") + 4));
    const double bandwidth = static_cast<double>(bytes) / row.ours / 1e3;
    row.extra = {{"p99", median(figures.p99)}, {"wrong", figures.wrong}};
    fmt::print("{:<40} {:>12} {:>10.2f} {:>10.2f} {:>8.2f} {:>8.2f} {:>6}", name, bytes / 4, row.ours,
               median(figures.p99), bandwidth, bandwidth * bus_factor(op, options.ranks), figures.wrong);
    for (const auto& [peer, table] : peers) {
      const auto found = table.find(shared);
      if (found == table.end()) {
        fmt::print(" {:>18}", "-");
        continue;
      }
      row.peers[peer] = median(found->second.p50);
      fmt::print(" {:>10.2f} {:>6.2f}x", row.peers[peer], row.peers[peer] / row.ours);
    }
    fmt::print("\n");
    rows.push_back(std::move(row));
  }
  CHORALE_CHECK_STATE(!rows.empty(), "[bench] the ranks gave no figures; run one case with --only to see why");
  print_bars(rows, options.ranks, options.hosts, options.fabric);
  if (!options.json.empty()) write_json(options.json, bench_report("collectives", rows));
}

// All of one round for each number of burners; rounds of ours and PyTorch's follow each other.
void run_busy(const Options& options, const std::filesystem::path& folder) {
  const auto peers = find_peers(options, nullptr, folder);
  CHORALE_CHECK_STATE(peers.size() == 1, "[bench] --busy needs PyTorch; --torch-python names a Python that has it");
  fmt::print("{:<48} {:>12} {:>12} {:>7}\n", "case", "ours us", "PyTorch us", "ratio");
  std::vector<BenchRow> rows;
  int file = 0;
  for (int burners : kBurnersPerCore) {
    Table ours, torch;
    {
      const Burners beside(Burners::on_each_core(burners));
      for (int round = 0; round < options.round_count(); ++round) {
        measure_ours(options, nullptr, folder, file++, ours);
        measure_peer(peers[0].command, options, "all_reduce", torch);
      }
    }
    for (const auto& [name, figures] : ours) {
      BenchRow row{
          .name = fmt::format("{}/busy{}", name, burners), .unit = "us", .ours = median(figures.p50), .peers = {}};
      if (const auto found = torch.find(name.substr(0, name.rfind('/'))); found != torch.end())
        row.peers["torch"] = median(found->second.p50);
      row.extra = {{"p99", median(figures.p99)}, {"wrong", figures.wrong}};
      print_busy(row);
      rows.push_back(std::move(row));
    }
  }
  CHORALE_CHECK_STATE(!rows.empty(), "[bench] the ranks gave no figures; run one case with --only to see why");
  print_busy_bars(rows);
  if (!options.json.empty()) write_json(options.json, bench_report("collectives_busy", rows));
}

void run(Options options) {
  if (options.as_rank >= 0) {
    return run_collectives_rank(options.as_rank, options.ranks, options.store, options.only, options.most_bytes,
                                options.busy);
  }
  if (options.busy) {
    CHORALE_CHECK(options.hosts == 1, "[bench] --busy measures one host");
    options.against = "torch";
    if (options.only.empty()) options.only = "all_reduce/";
  }
  std::vector<std::string> names;
  for (const CollectiveCase& c : collective_cases(options.ranks, options.most_bytes)) names.push_back(c.name);
  check_only(options.only, names);
  char name[] = "/tmp/chorale-bench-XXXXXX";
  CHORALE_CHECK_STATE(mkdtemp(name), "[bench] cannot make a folder in /tmp");
  const std::filesystem::path folder = name;
  if (options.busy) {
    run_busy(options, folder);
    std::filesystem::remove_all(folder);
    return;
  }
  Table ours;
  std::map<std::string, Table> tables;
  std::optional<TwoHosts> cable;
  if (options.hosts == 2) cable.emplace();
  const TwoHosts* hosts = cable ? &*cable : nullptr;
  const auto peers = find_peers(options, hosts, folder);
  for (int round = 0; round < options.round_count(); ++round) {
    measure_ours(options, hosts, folder, round, ours);
    for (const Peer& peer : peers) {
      // On one host PyTorch takes a minute, and is two orders away: once is enough.
      if (peer.name == "torch" && round > 0 && !hosts) continue;
      measure_peer(peer.command, options, "all_reduce", tables[peer.name]);
    }
  }
  std::filesystem::remove_all(folder);
  report(options, ours, tables);
}

}  // namespace
}  // namespace bench_collectives

void add_bench_collectives(CLI::App& bench, Work& work) {
  using namespace bench_collectives;
  CLI::App* command = bench.add_subcommand(
      "collectives", "Collectives among processes of this host, or of two, beside shared memory's floor, gloo and MPI");
  auto options = std::make_shared<Options>();
  command->add_option("-n,--ranks", options->ranks, "processes")->capture_default_str()->check(between(1, 256));
  command->add_option("--hosts", options->hosts, "2: two network namespaces with a cable, beside torch alone")
      ->capture_default_str()
      ->check(between(1, 2));
  command->add_option("--fabric", options->fabric, "between hosts: tls, or ucx[:DEVICE]")->capture_default_str();
  command
      ->add_option("--against", options->against,
                   "peers, among floor, torch and mpi; or before=PROGRAM, an older chorale")
      ->check(one_of_peers({"floor", "torch", "mpi", "before="}))
      ->capture_default_str();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name, such as all_reduce/f32/4096");
  command->add_option("--most-bytes", options->most_bytes, "no larger tensors")
      ->capture_default_str()
      ->check(between(1, 1e15));
  command
      ->add_option("--rounds", options->rounds, "measurements of each, in turns; the median counts (3; 5 with --busy)")
      ->check(between(1, 1e6));
  command->add_flag("--busy", options->busy,
                    "with one and two burners on each core, beside PyTorch alone; all_reduce unless --only says else");
  command->add_option("--as-rank", options->as_rank, "")->group("");
  command->add_option("--store", options->store, "")->group("");
  command->callback([options, &work] {
    work = [options] {
      if (const std::string before = before_program(options->against); !before.empty())
        return compare_with_before("collectives", before, options->json, 1);
      run(*options);
    };
  });
}

}  // namespace chorale::app
