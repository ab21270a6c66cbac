// `chorale bench sharded`: what sharded tensors cost beside PyTorch's: an op that sends nothing, redistributing, steps
// of tensor-parallel and fully sharded training and of ZeRO, checkpoints, and memory. Ranks are processes of one
// thread, this program again, measured in turns with the peer; steps of one rank alone, and of DDP, stand beside ours.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>

#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/models.h"
#include "chorale/app/bench/sharded_training.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/plans.h"
#include "chorale/transport/store/file_store.h"

namespace chorale::app {
namespace bench_sharded {
namespace {

struct Options {
  std::string json, only, against = "torch", python = "python3";
  int ranks = 2, rounds = 3;
};

// ---- the cases, as bench/peers/torch_sharded.py has them

struct Case {
  std::string name;
  const char* unit;
  double scale;  // of a second
  int count;     // calls that are timed, of which the median counts
  // Whether one rank runs it alone instead: with one thread, or with a thread for each core that the ranks together
  // have.
  enum class Alone : uint8_t { kNo, kOneThread, kAllThreads } alone = Alone::kNo;
  // Steps before anything is timed; the peer makes two calls. Cases that are held against our own only take more: over
  // the first ten steps a model's memory still grows, and clearing its huge pages takes a quarter of a rank's time.
  int warm_up = 3;
};
const Case kCases[] = {
    {"dispatch/add", "us", 1e6, 2000},
    {"dispatch/matmul", "us", 1e6, 2000},
    {"redistribute/rows to copies/4096", "us", 1e6, 2000},
    {"redistribute/rows to copies/16777216", "us", 1e6, 60},
    {"step/mlp512x4/tp", "ms", 1e3, 60},
    {"step/mlp512x4/alone", "ms", 1e3, 60, Case::Alone::kOneThread},
    {"step/bert_256x4/tp", "ms", 1e3, 24, Case::Alone::kNo, 16},
    {"step/bert_256x4/sequence", "ms", 1e3, 24, Case::Alone::kNo, 16},
    {"step/bert_256x4/alone", "ms", 1e3, 24, Case::Alone::kAllThreads, 16},
    {"step/mlp512x4/ddp", "ms", 1e3, 60},
    {"step/mlp512x4/fsdp", "ms", 1e3, 60},
    {"step/mlp512x4/zero", "ms", 1e3, 60},
    {"step/mlp512x4/zero2", "ms", 1e3, 60},
    {"step/bert_256x4/ddp", "ms", 1e3, 12},
    {"step/bert_256x4/fsdp", "ms", 1e3, 12},
    {"checkpoint/save", "s", 1, 5},                // as it comes: over files that an earlier save replaced
    {"checkpoint/save anew", "s", 1, 5},           // giving those back
    {"checkpoint/load", "s", 1, 5},                // with checksums; the peer has none
    {"checkpoint/load checked first", "s", 1, 5},  // all of them before the first value is replaced
    {"checkpoint/copy", "s", 1, 5},                // of what a rank has, in memory
    {"checkpoint/held up", "s", 1, 5},             // a step by a save in the background
    {"memory/mlp512x4/ddp", "MiB", 1.0 / (1 << 20), 1},
    {"memory/mlp512x4/zero", "MiB", 1.0 / (1 << 20), 1},
    {"memory/mlp512x4/zero2", "MiB", 1.0 / (1 << 20), 1},
    {"memory/mlp512x4/fsdp", "MiB", 1.0 / (1 << 20), 1},
    {"memory/bert_256x4/ddp", "MiB", 1.0 / (1 << 20), 1},
    {"memory/bert_256x4/zero", "MiB", 1.0 / (1 << 20), 1},
    {"memory/bert_256x4/zero2", "MiB", 1.0 / (1 << 20), 1},
    {"memory/bert_256x4/fsdp", "MiB", 1.0 / (1 << 20), 1},
};
// Megatron's, of a layer's forward and backward: two sums and two; with sequence parallel each is two calls.
constexpr int64_t kLayers = 4, kOfLayer = 4;
// What one call takes, with so many of it in one measurement: a clock is too coarse for one small op.
constexpr int kCallsTogether = 100;

std::string part_of(const std::string& name, int part) {
  size_t begin = 0;
  for (; part > 0; --part) begin = name.find('/', begin) + 1;
  return name.substr(begin, name.find('/', begin) - begin);
}

// The loss that bench_loss() computes, for logits that may be split along the classes.
Tensor loss_of(const Tensor& y, const Tensor& target) {
  const Tensor logits = y.dims() > 2 ? flatten(y, 0, -2) : y;
  return logits.is_sharded() ? to_local(parallel::loss_parallel(logits, target)) : cross_entropy(logits, target);
}

// Calls use(call), where call() is what the case measures.
template <class Use>
void with_case(const std::string& name, const Mesh& mesh, const Use& use) {
  const int64_t ranks = mesh.size();
  const std::string kind = part_of(name, 0);
  if (kind == "dispatch") {
    const Tensor a = distribute(ones({ranks, 16}), mesh, {shard(0)}),
                 w = distribute(ones({16, 16}), mesh, {replicate()});
    if (name == "dispatch/add") return use([&] { add(a, a); });
    return use([&] { matmul(a, w); });
  }
  if (kind == "redistribute") {
    const int64_t bytes = std::stoll(part_of(name, 2));
    const Tensor x = distribute(ones({ranks, bytes / 4 / ranks}), mesh, {shard(0)});
    return use([&] { full_tensor(x); });
  }
  const std::string how = part_of(name, 2);
  with_bench_model(part_of(name, 1), [&](auto model, const Tensor& x, const Tensor& target) {
    if (how != "alone") {
      const parallel::PlanOptions plan{.sequence_parallel = how == "sequence", .loss_parallel = true};
      parallel::tensor_parallel(model, mesh, parallel::plan_for(model, plan));
    }
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
    use([&] {
      optimizer.zero_grad();
      backward(loss_of(model(x), target));
      optimizer.step();
    });
  });
}

// ---- the ranks

struct Worker {
  std::string name, store, folder;
  int rank = 0, size = 1, threads = 1;
};

void print_figure(const comm::Group& group, double figure, int64_t collectives, double expected) {
  if (group.rank() == 0) fmt::print("{:.9e} {} {:.9e}\n", figure, collectives, expected);
}

// Prints the median of a case's calls, which are made in turn.
void print_median(const comm::Group& group, const TimedCall& timed, const Case& c, int together) {
  const auto call = [&] {
    timed.call();
    if (timed.after) timed.after();
  };
  for (int i = 1; i < c.warm_up; ++i) call();
  comm::CommCounter counter;
  call();
  const int64_t collectives = counter.total();
  group.barrier().wait();
  std::vector<double> seconds;
  seconds.reserve(static_cast<size_t>(c.count));
  for (int i = 0; i < c.count / together; ++i) {
    seconds.push_back(seconds_of(timed.call, together) / together);
    if (timed.after) timed.after();
  }
  group.barrier().wait();
  print_figure(group, median(seconds), collectives, 0);
}

// Rank 0 prints seconds of a call (bytes, in a case of memory), how many collectives one starts, and what was expected,
// where something is.
void measure_as_rank(const Worker& worker) {
  set_thread_count(worker.threads);
  manual_seed(1);
  transport::FileStore store(worker.store);
  const comm::Group group = comm::Group::connect(store, "bench", worker.rank, worker.size);
  const Mesh mesh(group, {worker.size}, {"tp"});
  const Case* found =
      std::find_if(std::begin(kCases), std::end(kCases), [&](const Case& c) { return c.name == worker.name; });
  CHORALE_CHECK(found != std::end(kCases), "[bench] no case ", worker.name);
  if (is_memory_case(worker.name)) {
    const PeakMemory memory = peak_memory(worker.name, mesh);
    return print_figure(group, memory.measured, 0, memory.expected);
  }
  const int together = worker.name.starts_with("dispatch") ? kCallsTogether : 1;
  const auto measure = [&](const TimedCall& timed) { print_median(group, timed, *found, together); };
  if (is_training_case(worker.name)) return with_training_case(worker.name, mesh, worker.folder, measure);
  with_case(worker.name, mesh, [&](const auto& call) { measure({call}); });
}

struct Figures {
  std::vector<double> ours, torch;
  int64_t collectives = 0;
  double expected = 0;
};

// What is saved goes into memory, where there is a folder of it: disks are not what is measured.
std::filesystem::path checkpoint_folder(const std::filesystem::path& folder) {
  const std::filesystem::path memory = "/dev/shm";
  return (access(memory.c_str(), W_OK) == 0 ? memory / folder.filename() : folder) / "checkpoint";
}

void measure_ours(const Case& c, const Options& options, const std::filesystem::path& folder, int round,
                  Figures& figures) {
  const int size = c.alone == Case::Alone::kNo ? options.ranks : 1;
  const int threads = c.alone == Case::Alone::kAllThreads ? options.ranks : 1;
  std::string name = c.name;
  std::replace_if(
      name.begin(), name.end(), [](char letter) { return letter == '/' || letter == ' '; }, '-');
  const std::string store = (folder / fmt::format("{}-{}", name, round)).string();
  std::string command = fmt::format("{{ export WORLD_SIZE={};", size);
  for (int rank = size - 1; rank >= 0; --rank) {
    command += fmt::format(
        " RANK={} '{}' bench sharded-rank '{}' --store '{}' --folder '{}' --rank {} --size {} --threads {}{}", rank,
        program_path(), c.name, store, checkpoint_folder(folder).string(), rank, size, threads, rank > 0 ? " &" : ";");
  }
  FILE* pipe = popen((command + " }").c_str(), "r");
  CHORALE_CHECK_STATE(pipe, "[bench] cannot start a shell");
  double figure = 0;
  const bool answered = std::fscanf(pipe, "%lf %ld %lf", &figure, &figures.collectives, &figures.expected) == 3;
  CHORALE_CHECK_STATE(pclose(pipe) == 0 && answered, "[bench] the ranks of ", c.name, " gave no figure");
  std::filesystem::remove_all(checkpoint_folder(folder));
  figures.ours.push_back(figure * c.scale);
  figures.expected *= c.scale;
}

// Everything that PyTorch measures, by case.
std::map<std::string, double> torch_turn(const Options& options, const std::filesystem::path& folder) {
  const std::string file = folder / "torch.json";
  const std::string command = fmt::format(
      "cd '{}' && OMP_NUM_THREADS=1 '{}' torch_sharded.py {} 1 --only '{}' --json '{}' --folder '{}' "
      "> /dev/null 2>&1",
      peers_folder(), options.python, options.ranks, options.only, file, checkpoint_folder(folder).string());
  CHORALE_CHECK_STATE(std::system(command.c_str()) == 0, "[bench] ", options.python, " cannot run torch_sharded.py");
  return nlohmann::json::parse(std::ifstream(file)).get<std::map<std::string, double>>();
}

// ---- the report

// What the figures are held against (docs/dev/bench.md).
void print_bars(const std::map<std::string, Figures>& all) {
  int reached = 0, missed = 0;
  std::string lines;
  const auto find = [&](const std::string& name) -> const Figures* {
    const auto found = all.find(name);
    return found == all.end() || found->second.ours.empty() ? nullptr : &found->second;
  };
  const auto note = [&](bool ok, const std::string& what, double found, const char* relation, double bar) {
    ++(ok ? reached : missed);
    lines += fmt::format("  {:<8} {}: {:.3g}, {} {:.3g}\n", ok ? "reached" : "missed", what, found, relation, bar);
  };
  const auto at_most = [&](const std::string& what, double found, double bar) {
    note(found <= bar, what, found, "at most", bar);
  };
  const auto over_torch = [&](const std::string& name, double bar) {
    const Figures* figures = find(name);
    if (!figures || figures->torch.empty()) return;
    const double ratio = median(figures->torch) / median(figures->ours);
    note(ratio >= bar, "PyTorch's " + name + " over ours", ratio, "at least", bar);
  };
  for (const char* name : {"dispatch/add", "dispatch/matmul"}) {
    if (const Figures* figures = find(name)) at_most(std::string(name) + ", us", median(figures->ours), 1);
    over_torch(name, 8);
  }
  over_torch("redistribute/rows to copies/4096", 100);
  over_torch("redistribute/rows to copies/16777216", 8);
  over_torch("step/mlp512x4/tp", 10);
  const auto beside = [&](const std::string& name, const std::string& other, const std::string& what, double bar) {
    const Figures *one = find(name), *two = find(other);
    if (one && two) at_most(name + " over " + what, median(one->ours) / median(two->ours), bar);
  };
  beside("step/mlp512x4/tp", "step/mlp512x4/alone", "alone", 0.8);
  beside("step/bert_256x4/tp", "step/bert_256x4/alone", "alone", 1.15);
  over_torch("step/mlp512x4/fsdp", 15);
  over_torch("step/bert_256x4/fsdp", 1.7);
  over_torch("step/mlp512x4/zero", 5);
  beside("step/mlp512x4/fsdp", "step/mlp512x4/ddp", "ddp", 1.3);
  beside("step/bert_256x4/fsdp", "step/bert_256x4/ddp", "ddp", 1.1);
  over_torch("checkpoint/save", 2);
  over_torch("checkpoint/load", 1.3);
  beside("checkpoint/held up", "checkpoint/copy", "a copy", 1.2);
  for (const auto& [name, figures] : all) {
    if (figures.expected <= 0 || !find(name)) continue;
    const double ratio = median(figures.ours) / figures.expected;
    note(ratio >= 0.95 && ratio <= 1.05, name + " over what its parts add up to", ratio, "within 0.05 of", 1);
  }
  // Beside its layers a step reduces the embedding's rows, the head's gradient and three numbers of the loss; with
  // sequence parallel the first two are two calls each, and the optimizer puts the gradients of 18 tensors of norms and
  // of the positions together, once each.
  const auto collectives = [&](const std::string& name, int64_t of_layer, int64_t others) {
    const Figures* figures = find(name);
    if (!figures) return;
    const double found = static_cast<double>(figures->collectives - others) / static_cast<double>(kLayers);
    note(figures->collectives == kLayers * of_layer + others, name + ", collectives of a layer", found, "exactly",
         static_cast<double>(of_layer));
  };
  collectives("step/bert_256x4/tp", kOfLayer, 2 + 3);
  collectives("step/bert_256x4/sequence", 2 * kOfLayer, 4 + 3 + 19);
  fmt::print("\nbars (docs/dev/bench.md): {} reached, {} missed\n{}", reached, missed, lines);
}

void run(const Options& options) {
  CHORALE_CHECK(!peers_folder().empty(), "[bench] bench/peers is not beside this program: run it from a checkout");
  std::vector<std::string> names;
  for (const Case& c : kCases) names.push_back(c.name);
  check_only(options.only, names);
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("chorale-bench-{}", getpid());
  std::filesystem::create_directories(folder);
  std::map<std::string, Figures> all;
  bool with_torch = options.against.find("torch") != std::string::npos;
  for (int round = 0; round < options.rounds; ++round) {
    for (const Case& c : kCases) {
      if (picks(options.only, c.name)) measure_ours(c, options, folder, round, all[c.name]);
    }
    if (!with_torch) continue;
    try {
      for (const auto& [name, value] : torch_turn(options, folder)) all[name].torch.push_back(value);
    } catch (const StateError& error) {
      fmt::print("({}; --torch-python names another)\n", error.what());
      with_torch = false;
    }
  }
  std::filesystem::remove_all(folder);
  std::filesystem::remove_all(checkpoint_folder(folder).parent_path());
  fmt::print("{:<40} {:>12} {:>4} {:>12} {:>12} {:>8}\n", "case", "ours", "", "collectives", "PyTorch", "ratio");
  std::vector<BenchRow> rows;
  for (const Case& c : kCases) {
    if (!picks(options.only, c.name)) continue;
    const Figures& figures = all[c.name];
    BenchRow row{.name = c.name, .unit = c.unit, .ours = median(figures.ours), .peers = {}};
    row.extra = {{"collectives", figures.collectives}, {"ranks", c.alone == Case::Alone::kNo ? options.ranks : 1}};
    std::string peer = fmt::format("{:>12} {:>8}", "-", "-");
    if (!figures.torch.empty()) {
      row.peers["torch"] = median(figures.torch);
      peer = fmt::format("{:>12.2f} {:>7.1f}x", row.peers["torch"], row.peers["torch"] / row.ours);
    }
    if (figures.expected > 0) row.extra["expected"] = figures.expected;
    // What stages of sharing save.
    std::string beside;
    const auto ddp = all.find(concat("memory/", part_of(c.name, 1), "/ddp"));
    if (is_memory_case(c.name) && ddp != all.end() && !ddp->second.ours.empty()) {
      row.extra["of_ddp"] = row.ours / median(ddp->second.ours);
      beside = fmt::format("  ({:.2f} of ddp)", row.ours / median(ddp->second.ours));
    }
    fmt::print("{:<40} {:>12.3f} {:>4} {:>12} {}{}{}\n", c.name, row.ours, c.unit, figures.collectives, peer,
               figures.expected > 0 ? fmt::format("  (expected {:.3f})", figures.expected) : "", beside);
    rows.push_back(std::move(row));
  }
  print_bars(all);
  if (!options.json.empty()) write_json(options.json, bench_report("sharded", rows));
}

}  // namespace
}  // namespace bench_sharded

void add_bench_sharded(CLI::App& bench, Work& work) {
  using namespace bench_sharded;
  CLI::App* command = bench.add_subcommand(
      "sharded", "Sharded tensors, tensor parallel and fully sharded steps, ZeRO and checkpoints, against PyTorch");
  auto options = std::make_shared<Options>();
  command->add_option("-n,--ranks", options->ranks, "processes, of one thread each")
      ->capture_default_str()
      ->check(between(2, 256));
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--against", options->against, "peers: torch, or none")
      ->check(one_of_peers({"torch"}))
      ->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name");
  command->add_option("--rounds", options->rounds, "turns of each side; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command->callback([options, &work] { work = [options] { run(*options); }; });

  CLI::App* hidden = bench.add_subcommand("sharded-rank", "A rank of `bench sharded`")->group("");
  auto worker = std::make_shared<Worker>();
  hidden->add_option("name", worker->name)->required();
  hidden->add_option("--store", worker->store)->required();
  hidden->add_option("--folder", worker->folder);
  hidden->add_option("--rank", worker->rank)->required();
  hidden->add_option("--size", worker->size)->required();
  hidden->add_option("--threads", worker->threads);
  hidden->callback([worker, &work] { work = [worker] { measure_as_rank(*worker); }; });
}

}  // namespace chorale::app
