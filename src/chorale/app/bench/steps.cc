// `chorale bench steps`: training steps of four models on one rank and one thread, beside PyTorch. Ours and theirs are
// processes of their own, measured in turns, so that memory and the time to the first step are those of a program that
// does nothing else.
#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <iostream>

#include "chorale/api/compile.h"
#include "chorale/app/bench/before.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/models.h"
#include "chorale/app/bench/steps_floor.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fused.h"
#include "chorale/kernel/cpu/dnnl/gemm.h"
#include "chorale/optim/optim.h"

namespace chorale::app {
namespace bench_steps {
namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, which Python's time.monotonic() reads too

double now_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// ---- the worker: trains one model, and answers like bench/peers/torch_steps.py --serve

struct Worker {
  std::string model;
  bool bf16 = false;
  bool in_backward = false;
  bool compiled = false;
  double memory_budget = 1;
  double started = now_seconds();
};

template <class Model>
void serve(const Worker& worker, double base_mib, Model model, const Tensor& x, const Tensor& target) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
  if (worker.in_backward) optimizer.update_in_backward();
  const auto train = [&](const Tensor& in, const Tensor& wanted) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16, worker.bf16);
      loss = bench_loss(model, in, wanted);
    }
    backward(loss);
    optimizer.step();
    return loss;
  };
  auto compiled =
      compile(train, {.whole_graph = true, .backend = codegen::fused(), .memory_budget = worker.memory_budget});
  const auto step = [&] {
    if (worker.compiled) {
      compiled(x, target);
    } else {
      train(x, target);
    }
  };
  step();
  const double first_ms = (now_seconds() - worker.started) * 1e3;
  // What no step can do without: parameters, gradients, two moments, and, if it makes them at all, the logits.
  const int64_t held = 4 * model.parameter_count() + target.elems() * classes_of(worker.model);
  double ms = 0;
  while (true) {
    std::cout << nlohmann::json{{"name", "chorale"},
                                {"ms", ms},
                                {"first_ms", first_ms},
                                {"base_mib", base_mib},
                                {"peak_mib", peak_mib()},
                                {"held_mib", static_cast<double>(held) * sizeof(float) / 0x1p20}}
                     .dump()
              << std::endl;
    int count = 0;
    if (!(std::cin >> count)) return;
    std::vector<double> times;
    times.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) times.push_back(seconds_of(step, 1) * 1e3);
    ms = median(times);
  }
}

void serve(const Worker& worker) {
  set_thread_count(1);
  const double base = peak_mib();
  with_bench_model(worker.model, [&](auto model, const Tensor& x, const Tensor& target) {
    serve(worker, base, std::move(model), x, target);
  });
}

// ---- the benchmark

struct StepCase {
  const char* model;
  double gflop;  // multiplications and additions of a step's products, in 1e9
  int steps;     // in one turn
};
// Products of three passes: forward, gradients of inputs (not of the first layer's), gradients of weights.
constexpr double product(double m, double n, double k) { return 2e-9 * m * n * k; }
constexpr StepCase kCases[] = {
    {"tinymlp", 2 * product(8, 32, 20) + 3 * product(8, 10, 32), 300},
    {"mlp512x4", 2 * product(32, 512, 512) + 3 * (3 * product(32, 512, 512) + product(32, 10, 512)), 40},
    {"cnn_fashion",
     2 * product(32 * 784, 32, 9) + 3 * (product(32 * 196, 64, 32 * 9) + product(32, 128, 3136) + product(32, 10, 128)),
     15},
    {"bert_256x4",
     3 * (4 * (product(1024, 12 * 256, 256) + 2 * product(8 * 4 * 128, 128, 64)) + product(1024, 8192, 256)), 3},
};

struct Options {
  std::string json;
  std::string python = "python3";
  std::string only;
  std::string against = "torch,compiled";
  bool compiled = false;
  int rounds = 5;
};

struct Side {
  std::string name;
  std::unique_ptr<PeerProcess> process;
  std::vector<double> ms;
  nlohmann::json last;

  void turn(int steps) {
    last = nlohmann::json::parse(process->ask(std::to_string(steps)));
    ms.push_back(last["ms"]);
  }
};

Side start(const std::string& name, std::vector<std::string> command) {
  command.insert(command.end(), {"--started", fmt::format("{:.6f}", now_seconds())});
  return {name, std::make_unique<PeerProcess>(command), {}, {}};
}

// What runs beside the plain step: the compiled one, or one that updates inside of backward.
const char* second_side(const Options& options) { return options.compiled ? "compiled" : "in_backward"; }

// The compiled step with memory_budget 0: of the one model whose memory has a bar.
bool measures_lean(const StepCase& c, bool bf16, const Options& options) {
  return options.compiled && !bf16 && std::string_view(c.model) == "bert_256x4";
}

std::vector<Side> start_sides(const StepCase& c, bool bf16, const Options& options) {
  std::vector<std::string> ours = {program_path(), "bench", "step-worker", c.model};
  std::vector<std::string> torch = {options.python, peers_folder() + "/torch_steps.py", "1", "1", "--serve", "--model",
                                    c.model};
  if (bf16) {
    ours.emplace_back("--bf16");
    torch.emplace_back("--bf16");
  }
  std::vector<Side> sides;
  sides.push_back(start("ours", ours));
  ours.emplace_back(options.compiled ? "--compiled" : "--in-backward");
  sides.push_back(start(second_side(options), ours));
  if (measures_lean(c, bf16, options)) {
    ours.insert(ours.end(), {"--memory-budget", "0"});
    sides.push_back(start("lean", ours));
  }
  const auto add_torch = [&](const char* name) {
    if (options.against.find(name) == std::string::npos) return;
    try {
      sides.push_back(start(name, torch));
    } catch (const StateError&) {
      fmt::print("({}: left out; {} cannot run bench/peers/torch_steps.py, --torch-python names another)\n", name,
                 options.python);
    }
  };
  add_torch("torch");
  torch.emplace_back("--compile");
  add_torch("compiled");
  return sides;
}

// GFLOP/s of oneDNN's product of two matrices of 1024 x 1024, on one thread.
double best_product_gflops() {
  constexpr int64_t n = 1024;
  const Tensor a = uniform({n, n}), b = uniform({n, n}), c = empty({n, n});
  const auto run = [&] {
    kernel::cpu::dnnl::sgemm(false, false, n, n, n, 1, a.data<float>(), n, b.data<float>(), n, 0, c.data<float>(), n);
  };
  run();
  std::vector<double> seconds;
  seconds.reserve(5);
  for (int i = 0; i < 5; ++i) seconds.push_back(seconds_of(run, 1));
  return product(n, n, n) / median(seconds);
}

void print(const BenchRow& row, double gflop) {
  const auto peer = [&](const char* name) {
    const auto found = row.peers.find(name);
    return found == row.peers.end() ? fmt::format("{:>10} {:>7}", "-", "-")
                                    : fmt::format("{:>10.3f} {:>6.2f}x", found->second, found->second / row.ours);
  };
  fmt::print("{:<36} {:>10.3f} {} {} {:>8.1f} {:>5.2f} {:>8.0f} {:>8.0f} {:>8.0f}\n", row.name, row.ours, peer("torch"),
             peer("compiled"), gflop / row.ours * 1e3, row.extra["share_of_product"].get<double>(),
             row.extra["peak_mib"].get<double>(), row.extra["growth_mib"].get<double>(),
             row.extra["first_ms"].get<double>());
  std::fflush(stdout);
}

struct Picked {
  const StepCase* what;
  bool bf16;
  std::string name;
};
std::vector<Picked> picked(const Options& options) {
  std::vector<Picked> all;
  std::vector<std::string> names;
  for (const StepCase& c : kCases) {
    for (const bool bf16 : {false, true}) {
      if (bf16 && std::string_view(c.model) != "bert_256x4") continue;
      all.push_back({&c, bf16, fmt::format("{}/local/n1/t1{}", c.model, bf16 ? "/bf16" : "")});
      names.push_back(all.back().name);
    }
  }
  check_only(options.only, names);
  std::erase_if(all, [&](const Picked& c) { return !picks(options.only, c.name); });
  return all;
}

void run(const Options& options) {
  set_thread_count(1);
  CHORALE_CHECK(!peers_folder().empty(), "[bench] bench/peers is not beside this program: run it from a checkout");
  const std::vector<Picked> cases = picked(options);
  std::vector<BenchRow> rows;
  fmt::print("{:<36} {:>10} {:>10} {:>7} {:>10} {:>7} {:>8} {:>5} {:>8} {:>8} {:>8}\n", "case", "ours ms", "PyTorch",
             "ratio", "compiled", "ratio", "GFLOP/s", "share", "peak MiB", "growth", "first ms");
  const double best = best_product_gflops();
  for (const auto& [what, bf16, name] : cases) {
    const StepCase& c = *what;
    std::vector<Side> sides = start_sides(c, bf16, options);
    for (int round = 0; round < options.rounds; ++round) {
      for (Side& side : sides) side.turn(c.steps);
    }
    const double floor = options.compiled && !bf16 ? step_floor_ms(c.model) : 0;
    std::map<std::string, double> peers;
    const size_t own = measures_lean(c, bf16, options) ? 3 : 2;
    for (size_t i = own; i < sides.size(); ++i) peers[sides[i].name] = median(sides[i].ms);
    for (size_t i = 0; i < own; ++i) {
      const Side& side = sides[i];
      const std::string second = options.compiled ? fmt::format("{}/local/n1/t1/compiled{}{}", c.model,
                                                                bf16 ? "/bf16" : "", i == 2 ? "/lean" : "")
                                                  : fmt::format("{}/{}", name, second_side(options));
      BenchRow row{.name = i == 0 ? name : second, .unit = "ms", .ours = median(side.ms), .peers = peers};
      const double peak = side.last["peak_mib"], base = side.last["base_mib"];
      row.extra = {{"peak_mib", peak},
                   {"growth_mib", peak - base},
                   {"held_mib", side.last["held_mib"]},
                   {"first_ms", side.last["first_ms"]},
                   {"gflops", c.gflop / row.ours * 1e3},
                   {"share_of_product", c.gflop / row.ours * 1e3 / best}};
      for (size_t j = own; j < sides.size(); ++j) {
        row.extra[sides[j].name + "_growth_mib"] =
            sides[j].last["peak_mib"].get<double>() - sides[j].last["base_mib"].get<double>();
        row.extra[sides[j].name + "_peak_mib"] = sides[j].last["peak_mib"];
        row.extra[sides[j].name + "_first_ms"] = sides[j].last["first_ms"];
      }
      if (floor > 0) row.extra["floor_ms"] = floor;
      print(row, c.gflop);
      if (i > 0 && own == 3) {
        const double eager = sides[0].last["peak_mib"].get<double>() - sides[0].last["base_mib"].get<double>();
        const double held = side.last["held_mib"];
        fmt::print(
            "{:<36} {:>10.2f} of the eager step's, {:.2f} of parameters, gradients, states and logits ({:.0f} MiB)\n",
            "  memory", (peak - base) / eager, (peak - base) / held, held);
      }
      if (floor > 0 && i < 2)
        fmt::print("{:<36} {:>10.3f} {:>6.1f} % of the floor's speed\n", "  floor", floor, floor / row.ours * 100);
      rows.push_back(std::move(row));
    }
    for (size_t j = own; j < sides.size(); ++j) {
      fmt::print("{:<36} {:>76.0f} {:>8.0f} {:>8.0f}\n", "  " + sides[j].name, sides[j].last["peak_mib"].get<double>(),
                 sides[j].last["peak_mib"].get<double>() - sides[j].last["base_mib"].get<double>(),
                 sides[j].last["first_ms"].get<double>());
    }
  }
  fmt::print("\noneDNN's own product of 1024 x 1024: {:.1f} GFLOP/s; share is that of a whole step\n", best);
  if (options.compiled) {
    fmt::print(
        "The floor of a step: its products at their own shapes by oneDNN, and the bytes of its update at memcpy's "
        "speed\n");
  }
  if (!options.json.empty()) write_json(options.json, bench_report("steps", rows));
}

}  // namespace
}  // namespace bench_steps

void add_bench_steps(CLI::App& bench, Work& work) {
  using namespace bench_steps;
  CLI::App* command =
      bench.add_subcommand("steps", "Training steps of four models, one rank and one thread, against PyTorch");
  auto options = std::make_shared<Options>();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command
      ->add_option("--against", options->against,
                   "peers, among torch and compiled; or before=PROGRAM, an older chorale")
      ->check(one_of_peers({"torch", "compiled", "before="}))
      ->capture_default_str();
  command->add_flag("--compiled", options->compiled, "measure the compiled step beside the plain one");
  command->add_option("--only", options->only, "cases with this in their name");
  command->add_option("--rounds", options->rounds, "turns of each side; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command->callback([options, &work] {
    work = [options] {
      if (const std::string before = before_program(options->against); !before.empty())
        return compare_with_before("steps", before, options->json);
      run(*options);
    };
  });

  CLI::App* hidden = bench.add_subcommand("step-worker", "Trains one model for `bench steps`")->group("");
  auto worker = std::make_shared<Worker>();
  hidden->add_option("model", worker->model)
      ->required()
      ->check(CLI::IsMember({"tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4"}));
  hidden->add_flag("--bf16", worker->bf16);
  hidden->add_flag("--in-backward", worker->in_backward);
  hidden->add_flag("--compiled", worker->compiled);
  hidden->add_option("--memory-budget", worker->memory_budget);
  hidden->add_option("--started", worker->started);
  hidden->callback([worker, &work] { work = [worker] { serve(*worker); }; });
}

}  // namespace chorale::app
