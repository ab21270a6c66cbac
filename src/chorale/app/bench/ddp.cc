// `chorale bench ddp`: data-parallel training steps of four models beside the same steps without communication, and
// beside PyTorch. Ranks are processes; those of one side form a group, take their orders from its rank 0, and are
// measured in turns with the other sides. On two hosts it shows how much of the communication hides behind backward.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <span>

#include "chorale/api/compile.h"
#include "chorale/app/bench/before.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/busy.h"
#include "chorale/app/bench/hosts.h"
#include "chorale/app/bench/models.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fused.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/trace/trace_summary.h"
#include "chorale/transport/store/file_store.h"

namespace chorale::app {
namespace bench_ddp {
namespace {

// ---- the worker

// How a side trains: alone, or data-parallel with these options.
struct Mode {
  const char* name;
  bool communicates;
  parallel::DdpOptions options{};
  bool meets = false;  // at a barrier after each step
};
// Lockstep is what training together costs without any gradient being moved: ranks wait for the slowest, and do what
// needs memory most at the same time.
const Mode kModes[] = {
    {"local", false},
    {"ddp", true},
    {"lockstep", false, {}, true},
    {"search-off", true, {.find_unused_parameters = parallel::FindUnused::kOff}},
    {"copies", true, {.gradient_as_bucket_view = false}},
};

struct Worker {
  std::string model, mode, store;
  int rank = 0, size = 1;
  std::optional<double> bucket_mb{};
  bool compiled = false;
};

// Where the time of a step goes, over a few steps that are traced.
nlohmann::json traced(const std::function<void()>& step) {
  constexpr int kSteps = 5;
  trace::start();
  for (int i = 0; i < kSteps; ++i) step();
  trace::StepTimes sum;
  const std::vector<trace::StepTimes> steps = trace::step_times(trace::stop());
  for (const trace::StepTimes& one : steps) {
    sum.compute += one.compute;
    sum.communication += one.communication;
    sum.exposed += one.exposed;
  }
  const auto ms = [&](trace::Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count() / kSteps;
  };
  return {{"compute_ms", ms(sum.compute)},
          {"comm_ms", ms(sum.communication)},
          {"exposed_ms", ms(sum.exposed)},
          {"hidden_pct", sum.hidden_share() * 100},
          {"summary", trace::summary(steps)}};
}

template <class Step>
void serve(const comm::Group& group, const Step& step, const std::function<nlohmann::json()>& facts) {
  while (true) {
    int64_t count = 0;
    if (group.rank() == 0 && !(std::cin >> count)) count = -1;
    group.broadcast(std::span(&count, 1), 0).wait();
    if (count < 0) return;
    step();
    group.barrier().wait();
    std::vector<double> times;
    for (int64_t i = 0; i < count; ++i) times.push_back(seconds_of(step, 1) * 1e3);
    const nlohmann::json where = traced(step);
    if (group.rank() > 0) continue;
    nlohmann::json answer = facts();
    answer.update(where);
    answer["ms"] = median(times);
    answer["best_ms"] = *std::min_element(times.begin(), times.end());
    answer["peak_mib"] = peak_mib();
    std::cout << answer.dump() << std::endl;
  }
}

template <class Model>
void serve(const Mode& mode, const comm::Group& group, const Worker& worker, Model model, const Tensor& x,
           const Tensor& target) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
  // A step, op by op or as one graph.
  const auto step_of = [&](auto& forward) -> std::function<void()> {
    const auto train = [&](const Tensor& in, const Tensor& wanted) {
      optimizer.zero_grad();
      const Tensor loss = bench_loss(forward, in, wanted);
      backward(loss);
      optimizer.step();
      return loss;
    };
    if (!worker.compiled) return [&, train] { train(x, target); };
    auto whole = compile(train, {.whole_graph = true, .backend = codegen::fused()});
    return [&, whole] { whole(x, target); };
  };
  if (!mode.communicates) {
    const auto alone = [&, step = step_of(model)] {
      step();
      if (mode.meets) group.barrier().wait();
    };
    serve(group, alone, [] { return nlohmann::json::object(); });
    return;
  }
  parallel::DdpOptions ddp_options = mode.options;
  ddp_options.bucket_cap_mb = worker.bucket_mb;
  parallel::DistributedDataParallel ddp(model, group, ddp_options);
  serve(group, step_of(ddp), [&] {
    const parallel::DdpLog log = ddp.log();
    return nlohmann::json{// By the volume of an all-reduce: every rank sends what it has to the adding rank, and
                          // what it added to all.
                          {"bytes_sent", log.total_parameter_size_bytes * 2 * (group.size() - 1) / group.size()},
                          {"buckets", ddp.reducer().bucket_count()},
                          {"progress", log.progress}};
  });
}

void serve(const Worker& worker) {
  std::cout << "{}" << std::endl;  // the others are started after this
  set_thread_count(1);
  const Mode* mode =
      std::find_if(std::begin(kModes), std::end(kModes), [&](const Mode& m) { return m.name == worker.mode; });
  CHORALE_CHECK(mode != std::end(kModes), "[bench] no mode ", worker.mode);
  transport::FileStore store(worker.store);
  const comm::Group group = comm::Group::connect(store, "bench", worker.rank, worker.size);
  with_bench_model(worker.model, [&](auto model, const Tensor& x, const Tensor& target) {
    serve(*mode, group, worker, std::move(model), x, target);
  });
}

// ---- the benchmark

struct Options {
  std::string json;
  std::string python = "python3";
  std::string only;
  std::string against = "torch";
  int ranks = 2;
  std::optional<int> rounds{};
  int round_count() const { return rounds.value_or(5); }
  std::optional<double> bucket_mb{};
  int hosts = 1;
  std::string fabric = "tls", rate;
  bool compiled = false;
  bool busy = false;
};

struct Side {
  std::string name;
  std::vector<std::unique_ptr<PeerProcess>> ranks;
  std::vector<double> ms;
  double best_ms = std::numeric_limits<double>::infinity();  // of all steps: what other programs disturbed least
  nlohmann::json last{};

  void turn(int steps) {
    last = nlohmann::json::parse(ranks[0]->ask(std::to_string(steps)));
    ms.push_back(last["ms"]);
    best_ms = std::min(best_ms, last["best_ms"].get<double>());
  }
};

// Where a side's ranks run, and where they meet.
struct Place {
  std::filesystem::path folder;
  std::optional<TwoHosts> hosts{};

  // The beginning of the command of a rank: its host, and the variables for the way between hosts.
  std::vector<std::string> command(int rank, const Options& options) const {
    std::vector<std::string> words{"/usr/bin/env"};
    if (hosts) {
      words = hosts->words(rank * 2 / options.ranks);
      words.push_back("env");
      const std::vector<std::string> variables = TwoHosts::variables(folder, options.fabric);
      words.insert(words.end(), variables.begin(), variables.end());
    }
    words.insert(words.end(), {fmt::format("WORLD_SIZE={}", options.ranks), fmt::format("RANK={}", rank)});
    return words;
  }
};

Side start(const std::string& model, const Mode& mode, const Options& options, const Place& place,
           const std::string& program = program_path(), int run = 0) {
  Side side{.name = mode.name, .ranks = {}, .ms = {}};
  const std::string store =
      place.folder / fmt::format("{}-{}-{}-{}", model, mode.name, std::hash<std::string>()(program), run);
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<std::string> command = place.command(rank, options);
    command.insert(command.end(), {program, "bench", "ddp-worker", model, mode.name, "--store", store, "--rank",
                                   std::to_string(rank), "--size", std::to_string(options.ranks)});
    if (options.compiled) command.emplace_back("--compiled");
    if (options.bucket_mb) command.insert(command.end(), {"--bucket-mb", std::to_string(*options.bucket_mb)});
    side.ranks.push_back(std::make_unique<PeerProcess>(command));
  }
  return side;
}

// Milliseconds of PyTorch's steps, local and data-parallel; throws StateError when it cannot run.
std::map<std::string, double> torch_turn(const std::string& model, int steps, const Options& options,
                                         const std::filesystem::path& folder) {
  const std::string file = folder / "torch.json";
  const std::string command = fmt::format(
      "OMP_NUM_THREADS=1 '{}' '{}/torch_steps.py' {} 1 --model {} --steps {} --mode {} --json '{}' > /dev/null 2>&1",
      options.python, peers_folder(), options.ranks, model, steps, options.busy ? "ddp" : "local,ddp", file);
  CHORALE_CHECK_STATE(std::system(command.c_str()) == 0, "[bench] ", options.python, " cannot run torch_steps.py");
  std::map<std::string, double> ms;
  for (const auto& row : nlohmann::json::parse(std::ifstream(file))) ms[row["mode"]] = row["ms"];
  return ms;
}

struct DdpCase {
  const char* model;
  int steps, busy_steps;
};
constexpr DdpCase kCases[] = {
    {"tinymlp", 1000, 200}, {"mlp512x4", 60, 30}, {"cnn_fashion", 15, 10}, {"bert_256x4", 3, 3}};

std::string name_of(const DdpCase& c, const Options& options) {
  const std::string where = options.hosts == 2 ? fmt::format("/{}{}", options.fabric, options.rate) : "";
  return fmt::format("{}/ddp/n{}/t1{}{}", c.model, options.ranks, where, options.compiled ? "/compiled" : "");
}

BenchRow measure(const DdpCase& c, const Options& options, const Place& place) {
  std::vector<Side> sides;
  // Whole graphs run alone, data-parallel, and in lockstep.
  for (const Mode& mode : std::span(kModes).first(options.compiled ? 3 : std::size(kModes))) {
    sides.push_back(start(c.model, mode, options, place));
  }
  std::map<std::string, std::vector<double>> torch;
  for (int round = 0; round < options.round_count(); ++round) {
    for (Side& side : sides) side.turn(c.steps);
    // Its start takes seconds.
    if (options.against.find("torch") == std::string::npos || round >= 3 || place.hosts) continue;
    try {
      for (const auto& [mode, ms] : torch_turn(c.model, c.steps, options, place.folder)) torch[mode].push_back(ms);
    } catch (const StateError& error) {
      fmt::print("({}; --torch-python names another)\n", error.what());
      break;
    }
  }
  const auto ms = [&](size_t side) { return median(sides[side].ms); };
  BenchRow row{.name = name_of(c, options), .unit = "ms", .ours = ms(1), .peers = {}};
  if (torch.contains("ddp")) row.peers["torch"] = median(torch["ddp"]);
  row.extra = sides[1].last;
  row.extra["local_ms"] = ms(0);
  row.extra["overhead_us"] = (ms(1) - ms(0)) * 1e3;
  row.extra["overhead_pct"] = (ms(1) / ms(0) - 1) * 100;
  row.extra["best_ms"] = sides[1].best_ms;
  row.extra["best_local_ms"] = sides[0].best_ms;
  row.extra["best_overhead_pct"] = (sides[1].best_ms / sides[0].best_ms - 1) * 100;
  row.extra["lockstep_pct"] = (ms(2) / ms(0) - 1) * 100;
  row.extra["best_lockstep_pct"] = (sides[2].best_ms / sides[0].best_ms - 1) * 100;
  row.extra["over_lockstep_pct"] = (ms(1) / ms(2) - 1) * 100;
  row.extra["best_over_lockstep_pct"] = (sides[1].best_ms / sides[2].best_ms - 1) * 100;
  row.extra["local_peak_mib"] = sides[0].last["peak_mib"];
  if (!options.compiled) {
    row.extra["search_off_ms"] = ms(3);
    row.extra["copies_ms"] = ms(4);
    row.extra["copies_peak_mib"] = sides[4].last["peak_mib"];
  }
  if (torch.contains("local")) row.extra["torch_local_ms"] = median(torch["local"]);
  return row;
}

void print(const BenchRow& row) {
  const auto number = [&](const char* name) { return row.extra[name].get<double>(); };
  const auto peer = row.peers.find("torch");
  fmt::print(
      "{:<20} {:>9.4f} {:>9.4f} {:>9.1f} {:>6.1f}% {:>9.4f} {:>9.4f} {:>6.1f}% {} {:>10.4f} {:>9.4f} {:>9.1f} "
      "{:>6.0f}% "
      "{:>7.0f} {:>7.0f} {:>7.0f}\n"
      "{:<20} {}; {} buckets, moved by {}; lockstep alone: {:+.1f} % over local ({:+.1f} % at best)\n",
      row.name, number("local_ms"), row.ours, number("overhead_us"), number("overhead_pct"), number("best_local_ms"),
      number("best_ms"), number("best_overhead_pct"),
      peer == row.peers.end() ? fmt::format("{:>9} {:>7}", "-", "-")
                              : fmt::format("{:>9.3f} {:>6.2f}x", peer->second, peer->second / row.ours),
      number("search_off_ms"), number("copies_ms"), number("bytes_sent") / 1024, number("hidden_pct"),
      number("local_peak_mib"), number("peak_mib"), number("copies_peak_mib"), "",
      row.extra["summary"].get<std::string>(), row.extra["buckets"].get<size_t>(),
      row.extra["progress"].get<std::string>(), number("lockstep_pct"), number("best_lockstep_pct"));
  std::fflush(stdout);
}

// Whole graphs: at most 3 % over lockstep is aimed at, for bert_256x4 and cnn_fashion on two ranks.
void print_compiled(const BenchRow& row) {
  const auto number = [&](const char* name) { return row.extra[name].get<double>(); };
  const auto peer = row.peers.find("torch");
  fmt::print("{:<29} {:>9.4f} {:>9.4f} {:>6.1f}% {:>6.1f}% {:>8.1f}% {:>8.1f}% {} {:>7.0f} {:>7.0f}\n", row.name,
             number("local_ms"), row.ours, number("overhead_pct"), number("best_overhead_pct"),
             number("over_lockstep_pct"), number("best_over_lockstep_pct"),
             peer == row.peers.end() ? fmt::format("{:>9} {:>7}", "-", "-")
                                     : fmt::format("{:>9.3f} {:>6.2f}x", peer->second, peer->second / row.ours),
             number("local_peak_mib"), number("peak_mib"));
  std::fflush(stdout);
}

// Ours and PyTorch's in turns, beside burners.
BenchRow measure_busy(const DdpCase& c, const Options& options, const Place& place, int burners) {
  const Burners beside(Burners::on_each_core(burners));
  Side ours = start(c.model, kModes[1], options, place);
  std::vector<double> torch;
  for (int round = 0; round < options.round_count(); ++round) {
    ours.turn(c.busy_steps);
    torch.push_back(torch_turn(c.model, c.busy_steps, options, place.folder).at("ddp"));
  }
  return {.name = fmt::format("{}/busy{}", name_of(c, options), burners),
          .unit = "ms",
          .ours = median(ours.ms),
          .peers = {{"torch", median(torch)}},
          .extra = ours.last};
}

// Data-parallel steps of an older program and of this one. All its other sides would take ten minutes.
void compare_with_before(const Options& options, const Place& place, const std::string& program) {
  std::vector<BenchRow> rows;
  for (const DdpCase& c : kCases) {
    if (!picks(options.only, name_of(c, options))) continue;
    std::vector<double> then, now;  // by run
    for (int run = 0; run < kRunsOfEach; ++run) {
      fmt::print(stderr, "{}, run {} of {}\n", c.model, run + 1, kRunsOfEach);
      Side before = start(c.model, kModes[1], options, place, program, run);
      Side ours = start(c.model, kModes[1], options, place, program_path(), run);
      for (int round = 0; round < options.rounds.value_or(3); ++round) {
        before.turn(c.steps);
        ours.turn(c.steps);
      }
      then.push_back(median(before.ms));
      now.push_back(median(ours.ms));
    }
    rows.push_back(
        {.name = name_of(c, options), .unit = "ms", .ours = median(now), .peers = {{"before", median(then)}}});
  }
  report_comparison("ddp", rows, options.json);
}

void run_busy(const Options& options, const Place& place) {
  CHORALE_CHECK(options.hosts == 1, "[bench] --busy measures one host");
  fmt::print("{:<48} {:>12} {:>12} {:>7}\n", "case", "ours ms", "PyTorch ms", "ratio");
  std::vector<BenchRow> rows;
  for (int burners : kBurnersPerCore) {
    for (const DdpCase& c : kCases) {
      if (!picks(options.only, name_of(c, options))) continue;
      rows.push_back(measure_busy(c, options, place, burners));
      print_busy(rows.back());
    }
  }
  print_busy_bars(rows);
  if (!options.json.empty()) write_json(options.json, bench_report("ddp_busy", rows));
}

void run(const Options& options) {
  CHORALE_CHECK(!peers_folder().empty(), "[bench] bench/peers is not beside this program: run it from a checkout");
  std::vector<std::string> names;
  for (const DdpCase& c : kCases) names.push_back(name_of(c, options));
  check_only(options.only, names);
  Place place{std::filesystem::temp_directory_path() / fmt::format("chorale-bench-{}", getpid())};
  std::filesystem::create_directories(place.folder);
  if (options.busy) {
    run_busy(options, place);
    std::filesystem::remove_all(place.folder);
    return;
  }
  if (options.hosts == 2) place.hosts.emplace(options.rate);
  if (const std::string before = before_program(options.against); !before.empty()) {
    compare_with_before(options, place, before);
    std::filesystem::remove_all(place.folder);
    return;
  }
  if (options.compiled) {
    fmt::print("{:<29} {:>9} {:>9} {:>7} {:>7} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}\n", "case", "local ms", "ddp ms",
               "over", "best", "lockstep", "best", "PyTorch", "ratio", "MiB loc", "ddp");
  } else {
    fmt::print(
        "{:<20} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9} {:>7} {:>9} {:>7} {:>10} {:>9} {:>9} {:>7} {:>7} {:>7} {:>7}\n",
        "case", "local ms", "ddp ms", "over us", "over", "best loc", "best ddp", "over", "PyTorch", "ratio",
        "search off", "copies", "KiB sent", "hidden", "MiB loc", "ddp", "copies");
  }
  std::vector<BenchRow> rows;
  for (const DdpCase& c : kCases) {
    if (!picks(options.only, name_of(c, options))) continue;
    rows.push_back(measure(c, options, place));
    options.compiled ? print_compiled(rows.back()) : print(rows.back());
  }
  std::filesystem::remove_all(place.folder);
  if (!options.json.empty()) write_json(options.json, bench_report("ddp", rows));
}

}  // namespace
}  // namespace bench_ddp

void add_bench_ddp(CLI::App& bench, Work& work) {
  using namespace bench_ddp;
  CLI::App* command = bench.add_subcommand("ddp", "Data-parallel training steps of four models, against PyTorch");
  auto options = std::make_shared<Options>();
  command->add_option("-n,--ranks", options->ranks, "processes, of one thread each")
      ->capture_default_str()
      ->check(between(1, 256));
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--against", options->against, "peers: torch, or none; or before=PROGRAM, an older chorale")
      ->check(one_of_peers({"torch", "before="}))
      ->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name");
  command->add_option("--rounds", options->rounds, "turns of each side; the median counts (5; 3 with before=)")
      ->check(between(1, 1e6));
  command->add_option("--bucket-mb", options->bucket_mb, "buckets of so many MiB (default: the first 1, the others 25)")
      ->check(between(1e-6, 1e6));
  command->add_flag("--compiled", options->compiled, "whole steps as one graph, beside the same in lockstep");
  command->add_option("--hosts", options->hosts, "2: two network namespaces with a cable, not against torch")
      ->capture_default_str()
      ->check(between(1, 2));
  command->add_option("--fabric", options->fabric, "between hosts: tls, or ucx[:DEVICE]")->capture_default_str();
  command->add_flag("--busy", options->busy, "with one and two burners on each core, beside PyTorch alone");
  command->add_option("--rate", options->rate, "of the cable between hosts, such as 1gbit");
  command->callback([options, &work] { work = [options] { run(*options); }; });

  CLI::App* hidden = bench.add_subcommand("ddp-worker", "A rank of `bench ddp`")->group("");
  auto worker = std::make_shared<Worker>();
  hidden->add_option("model", worker->model)->required();
  hidden->add_option("mode", worker->mode)->required();
  hidden->add_option("--store", worker->store)->required();
  hidden->add_option("--rank", worker->rank)->required();
  hidden->add_option("--size", worker->size)->required();
  hidden->add_option("--bucket-mb", worker->bucket_mb);
  hidden->add_flag("--compiled", worker->compiled);
  hidden->callback([worker, &work] { work = [worker] { serve(*worker); }; });
}

}  // namespace chorale::app
