// `chorale bench recovery`: what the commit point costs where nobody dies, and how long a job stands still when a rank
// is killed, by parts: from the kill to the first step that is done without it, and again when its replacement joins.
// Ranks are this program, started by `chorale run --elastic`, on this host or on two network namespaces.
#include "chorale/app/bench/recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>

#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/hosts.h"
#include "chorale/app/bench/models.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/elastic/elastic.h"
#include "chorale/optim/optim.h"

namespace chorale::app {
namespace bench_recovery {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> ranks{2, 4, 8};
  int kills = 5;
  int steps = 200;  // with all ranks, before the first kill
  int hosts = 1;
  std::string model = "mlp512x4", fabric = "tls", json;
  // A rank of a job of so many, which finds in this folder when the last one was killed.
  int as_rank_of = 0;
  std::string folder;
};

constexpr int64_t kStepsBetween = 20;  // with all ranks, before the next kill
constexpr int64_t kWarmUp = 10;        // steps that are not counted
constexpr int kRoundTrips = 200;
constexpr const char* kParts[] = {"notice", "verdict", "agreement", "regroup", "transfer", "step"};

int64_t ns_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// ---- a rank

// One line for each change that rank 0 has come through: its kind, the total, and the parts, in milliseconds.
void print_change(const elastic::Change& change, int64_t killed_ns) {
  // A replacement may be there before the others have met.
  const bool death = change.cause.find(" died: ") != std::string::npos;
  const auto began = death ? killed_ns : ns_of(change.noticed);
  const double parts[] = {static_cast<double>(ns_of(change.noticed) - began) / 1e6, change.verdict_ms,
                          change.agreement_ms, change.regroup_ms, change.transfer_ms};
  const double total = static_cast<double>(ns_of(Clock::now()) - began) / 1e6;
  double rest = total;
  std::string line = fmt::format("{}\t{}", death ? "kill" : "join", total);
  for (const double part : parts) {
    line += fmt::format("\t{}", part);
    rest -= part;
  }
  std::cout << line + fmt::format("\t{}\n", rest) << std::flush;
}

// Milliseconds that this rank spends in the commit points of a job without deaths, and between two beginnings of steps.
struct Commits {
  std::vector<double> inside, between;
  Clock::time_point begun, entered;

  void note(elastic::Phase phase) {
    const auto now = Clock::now();
    const auto ms = [now](Clock::time_point since) {
      return std::chrono::duration<double, std::milli>(now - since).count();
    };
    if (phase == elastic::Phase::kBegin) {
      if (begun != Clock::time_point()) between.push_back(ms(begun));
      begun = now;
    } else if (phase == elastic::Phase::kCommit) {
      entered = now;
    } else if (phase == elastic::Phase::kUpdate) {
      inside.push_back(ms(entered));
    }
  }
};

// There and back between the first rank and the last, in milliseconds.
double round_trip(const comm::Group& group) {
  const Tensor byte = zeros({1}, DType::kU8);
  const int peer = group.size() - 1 - group.rank();
  const auto there_and_back = [&] {
    if (group.rank() == 0) group.send(byte, peer);
    if (group.rank() == 0 || peer == 0) group.recv(byte, peer);
    if (peer == 0) group.send(byte, peer);
  };
  for (int64_t i = 0; i < kWarmUp; ++i) there_and_back();
  return seconds_of(there_and_back, kRoundTrips) * 1e3 / kRoundTrips;
}

// One line by rank 0: the step, the commit point as ranks see it on average, and as the one does that comes last, both
// as the median over steps; how much of all steps it takes, in percent, by both; and a round trip.
void print_commits(const comm::Group& group, const Commits& commits) {
  const double trip = round_trip(group);
  const auto ranks = static_cast<size_t>(group.size());
  const size_t count = std::min(commits.between.size(), commits.inside.size());
  const auto all = [&](const std::vector<double>& own) {
    std::vector<double> values(count * ranks);
    group.all_gather_into(std::span(values), std::span(own).first(count)).wait();
    return values;
  };
  const std::vector<double> inside = all(commits.inside), between = all(commits.between);
  if (group.rank() > 0) return;
  std::vector<double> steps, means, lasts;
  double sum = 0, sum_of_means = 0, sum_of_lasts = 0;
  for (auto step = static_cast<size_t>(kWarmUp); step < count; ++step) {
    double mean = 0, last = inside[step];
    for (size_t rank = 0; rank < ranks; ++rank) {
      mean += inside[rank * count + step] / static_cast<double>(ranks);
      last = std::min(last, inside[rank * count + step]);
    }
    steps.push_back(between[step]);
    means.push_back(mean);
    lasts.push_back(last);
    sum += between[step];
    sum_of_means += mean;
    sum_of_lasts += last;
  }
  std::cout << fmt::format("commit\t{}\t{}\t{}\t{}\t{}\t{}\n", median(steps), median(means), median(lasts),
                           sum_of_means / sum * 100, sum_of_lasts / sum * 100, trip)
            << std::flush;
}

void run_rank(const Options& options) {
  const auto seat = elastic::Seat::from_environment();
  CHORALE_CHECK_STATE(seat, "[bench] this is a rank of chorale bench recovery");
  const std::filesystem::path killed = std::filesystem::path(options.folder) / "killed";
  Commits commits;
  elastic::Elastic job({.watch = [&commits](elastic::Phase phase, int64_t) { commits.note(phase); }, .seat = seat});
  with_bench_model(options.model, [&](auto module, const Tensor& x, const Tensor& target) {
    parallel::DistributedDataParallel model(std::move(module), job.group());
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
    job.keep(model, optimizer);
    size_t printed = 1;
    job.run(int64_t{1} << 40, [&](int64_t step) {
      if (job.epoch() == 1 && step == options.steps) print_commits(job.group(), commits);
      const int64_t between = job.epoch() == 1 ? options.steps : kStepsBetween;
      if (job.group().size() == options.as_rank_of && step - job.changes().back().step >= between) {
        const auto count = static_cast<int>(job.epoch() / 2);  // deaths so far
        if (count >= options.kills) {
          job.stop();
        } else if (job.group().rank() == count % options.as_rank_of) {
          std::ofstream(killed) << ns_of(Clock::now());
          std::raise(SIGKILL);
        }
      }
      backward(bench_loss(model, x, target));
      job.step();
      const std::vector<elastic::Change>& changes = job.changes();
      if (job.group().rank() == 0 && changes.size() > printed) {
        int64_t when = 0;
        std::ifstream(killed) >> when;
        print_change(changes.back(), when);
      }
      printed = changes.size();
    });
  });
}

// ---- the table

using Figures = std::map<std::string, std::vector<std::vector<double>>>;  // by kind: lines of numbers

constexpr size_t kNumbersOfCommits = 6;

// The command of the launcher of a host.
std::string command_of(const Options& options, int ranks, const std::string& folder,
                       const std::optional<TwoHosts>& hosts, int host) {
  const std::string program = program_path();
  const std::string chorale = std::filesystem::path(program).parent_path() / "chorale";
  std::string place, nodes;
  if (hosts) {
    place = hosts->prefix(host) + " env";
    for (const std::string& variable : TwoHosts::variables(folder, options.fabric)) place += " " + variable;
    nodes = fmt::format(" --nnodes 2 --node-rank {} --rdzv {}:29551", host, TwoHosts::address(0));
  }
  return fmt::format(
      "{} '{}' run -n {} --elastic 1:{}{} env OMP_NUM_THREADS=1 '{}' bench recovery --kills {} --steps {} --model {} "
      "--as-rank-of {} --folder '{}' >'{}/said{}' 2>&1",
      place, chorale, ranks / options.hosts, ranks, nodes, program, options.kills, options.steps, options.model, ranks,
      folder, folder, host);
}

Figures measure(const Options& options, int ranks, const std::string& folder, const std::optional<TwoHosts>& hosts) {
  std::string commands = command_of(options, ranks, folder, hosts, 0);
  if (hosts)
    commands = fmt::format("({}) & first=$!; {}; second=$?; wait $first && exit $second", commands,
                           command_of(options, ranks, folder, hosts, 1));
  const int status = std::system(commands.c_str());
  std::string text;
  for (int host = 0; host < options.hosts; ++host) {
    std::ifstream said(fmt::format("{}/said{}", folder, host));
    text.append(std::istreambuf_iterator<char>(said), {});
  }
  CHORALE_CHECK_STATE(status == 0, "[bench] the job failed: ", commands, "\n", text);
  Figures figures;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(std::min(line.size(), line.find(' ') + 1)));  // behind "[0] "
    std::string kind;
    words >> kind;
    const bool is_change = kind == "kill" || kind == "join";
    if (!is_change && kind != "commit") continue;
    std::vector<double> numbers;
    for (double number = 0; words >> number;) numbers.push_back(number);
    if (numbers.size() == (is_change ? 1 + std::size(kParts) : kNumbersOfCommits)) figures[kind].push_back(numbers);
  }
  return figures;
}

BenchRow row_of_commits(const std::string& name, const std::vector<double>& numbers) {
  BenchRow row{.name = name, .unit = "ms", .ours = numbers[1], .peers = {}};
  row.extra = {{"step", numbers[0]},
               {"last", numbers[2]},
               {"share_pct", numbers[3]},
               {"share_of_last_pct", numbers[4]},
               {"round_trip", numbers[5]}};
  fmt::print("{:<26} of {:.3f}: {:.4f}, {:.2f} %; of the rank that comes last {:.4f}, {:.2f} %; round trip {:.4f}\n",
             name, numbers[0], numbers[1], numbers[3], numbers[2], numbers[4], numbers[5]);
  return row;
}

BenchRow row_of_changes(const std::string& name, const std::vector<std::vector<double>>& lines) {
  const auto column = [&](size_t i) {
    std::vector<double> values;
    for (const auto& line : lines) values.push_back(line[i]);
    std::sort(values.begin(), values.end());
    return values;
  };
  const std::vector<double> totals = column(0);
  BenchRow row{.name = name, .unit = "ms", .ours = median(totals), .peers = {}};
  row.extra["p99"] = totals.back();
  row.extra["changes"] = totals.size();
  fmt::print("{:<26} {:>7} {:>9.2f} {:>9.2f}", name, totals.size(), row.ours, totals.back());
  for (size_t i = 0; i < std::size(kParts); ++i) {
    row.extra[kParts[i]] = median(column(i + 1));
    fmt::print(" {:>9.2f}", median(column(i + 1)));
  }
  fmt::print("\n");
  return row;
}

void run(const Options& options) {
  if (options.as_rank_of > 0) return run_rank(options);
  for (const int ranks : options.ranks)
    CHORALE_CHECK(ranks % options.hosts == 0, "[bench] ", ranks, " ranks cannot be shared out over two hosts");
  char name[] = "/tmp/chorale-bench-XXXXXX";
  CHORALE_CHECK_STATE(mkdtemp(name), "[bench] cannot make a folder in /tmp");
  const std::filesystem::path folder = name;
  std::optional<TwoHosts> hosts;
  if (options.hosts == 2) hosts.emplace();
  fmt::print("{:<26} {:>7} {:>9} {:>9}", "case (ms)", "changes", "p50", "p99");
  for (const char* part : kParts) fmt::print(" {:>9}", part);
  fmt::print("\n");
  std::vector<BenchRow> rows;
  for (const int ranks : options.ranks) {
    for (const auto& [kind, lines] : measure(options, ranks, folder, hosts)) {
      const std::string of =
          fmt::format("{}/{}/n{}{}", kind, options.model, ranks, hosts ? "/" + options.fabric : std::string());
      rows.push_back(kind == "commit" ? row_of_commits(of, lines.front()) : row_of_changes(of, lines));
    }
    std::fflush(stdout);
  }
  std::filesystem::remove_all(folder);
  fmt::print(
      "\nnotice: from the kill to a failed call; verdict: to the launcher's word; agreement: who has come how far; "
      "regroup: groups;\ntransfer: states to a newcomer; step: to the end of the first step. p99 is the longest of "
      "fewer than a hundred.\ncommit: what a rank spends at the commit point of a step where nobody dies, waiting for "
      "slower ranks in it;\nwhat the last one spends there is its cost.\n");
  if (!options.json.empty()) write_json(options.json, bench_report("recovery", rows));
}

}  // namespace
}  // namespace bench_recovery

void add_bench_recovery(CLI::App& bench, Work& work) {
  using namespace bench_recovery;
  CLI::App* command = bench.add_subcommand("recovery", "How long a job stands still when a rank is killed, by parts");
  auto options = std::make_shared<Options>();
  command->add_option("-n,--ranks", options->ranks, "numbers of ranks")->delimiter(',')->check(between(2, 64));
  command->add_option("--kills", options->kills, "of each number of ranks")
      ->capture_default_str()
      ->check(between(0, 1e6));
  command->add_option("--steps", options->steps, "before the first kill: what the commit point costs")
      ->capture_default_str()
      ->check(between(2 * kWarmUp, 1e6));
  command->add_option("--hosts", options->hosts, "2: two network namespaces with a cable, ranks on both")
      ->capture_default_str()
      ->check(between(1, 2));
  command->add_option("--fabric", options->fabric, "between hosts: tls, or ucx[:DEVICE]")->capture_default_str();
  command->add_option("--model", options->model, "tinymlp, mlp512x4, cnn_fashion or bert_256x4")
      ->capture_default_str()
      ->check(CLI::IsMember({"tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4"}));
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--as-rank-of", options->as_rank_of, "")->group("");
  command->add_option("--folder", options->folder, "")->group("");
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
