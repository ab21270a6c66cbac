// `chorale bench recovery`: how long a job stands still when a rank is killed, by parts: from the kill to the first
// step that is done without it, and again when its replacement joins. Ranks are this program, started by `chorale run
// --elastic`.
#include "chorale/app/bench/recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>

#include "chorale/app/bench/bench.h"
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
  std::string model = "mlp512x4", json;
  int as_rank_of = 0;  // a job of so many
};

constexpr int64_t kStepsBetween = 20;  // with all ranks, before the next kill
constexpr const char* kParts[] = {"notice", "verdict", "agreement", "regroup", "transfer", "step"};

int64_t ns_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// ---- a rank

// One line for each change that rank 0 has come through: its kind, the total, and the parts, in milliseconds.
void print_change(const elastic::Change& change, int64_t killed_ns) {
  const bool death = change.newcomers == 0;
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

void run_rank(const Options& options) {
  const auto seat = elastic::Seat::from_environment();
  CHORALE_CHECK_STATE(seat, "[bench] this is a rank of chorale bench recovery");
  elastic::Elastic job({.seat = seat});
  with_bench_model(options.model, [&](auto module, const Tensor& x, const Tensor& target) {
    parallel::DistributedDataParallel model(std::move(module), job.group());
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
    job.keep(model, optimizer);
    size_t printed = 1;
    job.run(int64_t{1} << 40, [&](int64_t step) {
      const auto deadline = within(10s);
      if (job.group().size() == options.as_rank_of && step - job.changes().back().step >= kStepsBetween) {
        const auto count = static_cast<int>(job.epoch() / 2);  // deaths so far
        if (count >= options.kills) {
          job.stop();
        } else if (job.group().rank() == count % options.as_rank_of) {
          seat->store->set("killed", std::to_string(ns_of(Clock::now())), deadline);
          std::raise(SIGKILL);
        }
      }
      backward(bench_loss(model, x, target));
      job.step();
      const std::vector<elastic::Change>& changes = job.changes();
      if (job.group().rank() == 0 && changes.size() > printed)
        print_change(changes.back(), std::stoll(seat->store->get("killed", deadline)));
      printed = changes.size();
    });
  });
}

// ---- the table

using Figures = std::map<std::string, std::vector<std::vector<double>>>;  // by kind: lines of numbers

Figures measure(const Options& options, int ranks) {
  const std::string program = program_path();
  const std::string chorale = std::filesystem::path(program).parent_path() / "chorale";
  const std::string command = fmt::format(
      "'{}' run -n {} --elastic 1:{} env OMP_NUM_THREADS=1 '{}' bench recovery --kills {} --model {} --as-rank-of {} "
      "2>&1",
      chorale, ranks, ranks, program, options.kills, options.model, ranks);
  FILE* pipe = popen(command.c_str(), "r");
  CHORALE_CHECK_STATE(pipe, "[bench] cannot start ", chorale);
  std::string text;
  for (int c; (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  const int status = pclose(pipe);
  CHORALE_CHECK_STATE(status == 0, "[bench] the job failed: ", command, "\n", text);
  Figures figures;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(std::min(line.size(), line.find(' ') + 1)));  // behind "[0] "
    std::string kind;
    words >> kind;
    if (kind != "kill" && kind != "join") continue;
    std::vector<double> numbers;
    for (double number = 0; words >> number;) numbers.push_back(number);
    if (numbers.size() == 1 + std::size(kParts)) figures[kind].push_back(numbers);
  }
  return figures;
}

void run(const Options& options) {
  if (options.as_rank_of > 0) return run_rank(options);
  fmt::print("{:<22} {:>7} {:>9} {:>9}", "case (ms)", "changes", "p50", "p99");
  for (const char* part : kParts) fmt::print(" {:>9}", part);
  fmt::print("\n");
  std::vector<BenchRow> rows;
  for (const int ranks : options.ranks) {
    for (const auto& [kind, lines] : measure(options, ranks)) {
      const auto column = [&lines_of_kind = lines](size_t i) {
        std::vector<double> values;
        for (const auto& line : lines_of_kind) values.push_back(line[i]);
        std::sort(values.begin(), values.end());
        return values;
      };
      const std::vector<double> totals = column(0);
      BenchRow row{.name = fmt::format("{}/{}/n{}", kind, options.model, ranks),
                   .unit = "ms",
                   .ours = median(totals),
                   .peers = {}};
      row.extra["p99"] = totals.back();
      row.extra["changes"] = totals.size();
      fmt::print("{:<22} {:>7} {:>9.2f} {:>9.2f}", row.name, totals.size(), row.ours, totals.back());
      for (size_t i = 0; i < std::size(kParts); ++i) {
        row.extra[kParts[i]] = median(column(i + 1));
        fmt::print(" {:>9.2f}", median(column(i + 1)));
      }
      fmt::print("\n");
      rows.push_back(std::move(row));
    }
  }
  fmt::print(
      "\nnotice: from the kill to a failed call; verdict: to the launcher's word; agreement: who has come how far; "
      "regroup: groups;\ntransfer: states to a newcomer; step: to the end of the first step. p99 is the longest of "
      "fewer than a hundred.\n");
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
      ->check(between(1, 1e6));
  command->add_option("--model", options->model, "tinymlp, mlp512x4, cnn_fashion or bert_256x4")
      ->capture_default_str()
      ->check(CLI::IsMember({"tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4"}));
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--as-rank-of", options->as_rank_of, "")->group("");
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
