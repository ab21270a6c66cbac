// `chorale bench gpu`: training steps on one GPU, run op by op, replayed as one program, and compiled, beside PyTorch
// and beside the sum of the vendor's best kernels for a step.
#include "chorale/app/bench/gpu.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/api/replay.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/models/encoder.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/mlp.h"
#include "chorale/models/resnet.h"
#include "chorale/nn/fp8.h"
#include "chorale/optim/optim.h"

namespace chorale::app {
namespace bench_gpu {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};
using Clock = std::chrono::steady_clock;

struct Options {
  std::string json;
  std::string python = "python3";
  std::string only;
  std::string against = "torch,floor";
  int steps = 20;
};

struct GpuCase {
  const char* model;
  int64_t items;      // tokens or images of a step
  bool lower;         // bf16 over f32 weights
  int more_steps;     // times --steps, where a step is short
  const char* floor;  // the name in gpu_floor.py; null: it has none
  const char* head;   // the layer that is not of 8 bits where others are; null: none are
};
constexpr GpuCase kCases[] = {
    {"gpt2_124m", 32 * 1024, true, 1, "gpt2-124M", "lm_head"},
    {"bert_base", 32 * 512, true, 1, "bert-base", "head"},
    {"resnet50", 256, true, 1, "resnet50", nullptr},
    {"mlp512x4", 32, false, 50, nullptr, nullptr},
    {"tinymlp", 8, false, 50, nullptr, nullptr},
};

// Calls use(model, inputs, targets), on the GPU.
template <class Use>
void with_model(const std::string& name, const Use& use) {
  manual_seed(1);
  const auto classes = [](int64_t count, int64_t n) {
    return randint(0, count, {n}, DType::kI64, default_generator(), kGpu);
  };
  const auto ids = [](int64_t vocabulary, int64_t length) {
    return randint(0, vocabulary, {32, length}, DType::kI64, default_generator(), kGpu);
  };
  if (name == "gpt2_124m") {
    const Tensor tokens = ids(50304, 1024);
    models::Gpt2Config config{.vocab_size = 50304, .embd_pdrop = 0, .resid_pdrop = 0, .attn_pdrop = 0};
    use(models::Gpt2(config), tokens, flatten(tokens));
  } else if (name == "bert_base") {
    const Tensor tokens = ids(30522, 512);
    use(models::Encoder({.vocabulary = 30522, .width = 768, .layers = 12, .heads = 12, .length = 512}), tokens,
        flatten(tokens));
  } else if (name == "resnet50") {
    // Channels last, as PyTorch has them here.
    const Tensor images = permute(to(normal({256, 224, 224, 3}), kGpu), {0, 3, 1, 2});
    use(models::resnet50(1000), images, classes(1000, 256));
  } else if (name == "mlp512x4") {
    use(models::mlp({512, 512, 512, 512, 512, 10}), to(normal({32, 512}), kGpu), classes(10, 32));
  } else {
    use(models::mlp({20, 32, 10}), to(normal({8, 20}), kGpu), classes(10, 8));
  }
}

// Milliseconds of a step, the median of five stretches without a wait inside.
template <class Step>
double measure(const Step& step, int steps) {
  std::vector<double> times;
  times.reserve(5);
  const int each = std::max(1, steps / 5);
  for (int i = 0; i < 5; ++i) {
    synchronize(kGpu);
    const auto start = Clock::now();
    for (int k = 0; k < each; ++k) step();
    synchronize(kGpu);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count() / each);
  }
  return median(times);
}

// Op by op; recorded and replayed; compiled whole, with generated kernels, and that replayed; or this with linear
// layers of 8 bits.
enum class Way { kEager, kReplayed, kCompiled, kFp8 };
constexpr Way kWays[] = {Way::kEager, Way::kReplayed, Way::kCompiled, Way::kFp8};
std::string case_name(const GpuCase& c, Way way) {
  constexpr const char* kNames[] = {"eager", "replayed", "compiled", "fp8"};
  return fmt::format("{}/{}", c.model, kNames[static_cast<size_t>(way)]);
}

bool is_picked(const Options& options, const GpuCase& c, Way way) {
  return (way != Way::kFp8 || c.head) && picks(options.only, case_name(c, way));
}
bool is_any_picked(const Options& options, const GpuCase& c) {
  return std::any_of(std::begin(kWays), std::end(kWays), [&](Way way) { return is_picked(options, c, way); });
}

struct Measured {
  double ms = 0, first_s = 0, peak_gib = 0;
};
Measured measure_ours(const GpuCase& c, Way way, int steps) {
  Measured result;
  Allocator& allocator = runtime_of(kGpu).allocator(kGpu);
  with_model(c.model, [&](auto model, const Tensor& x, const Tensor& target) {
    model.to(kGpu);
    if (way == Way::kFp8) nn::use_fp8(model, {c.head});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-4});
    const Replayed::Function train = [&](const std::vector<Tensor>& in) {
      optimizer.zero_grad();
      Tensor loss;
      {
        const Autocast scope(DType::kBF16, c.lower);
        const Tensor y = model(in[0]);
        loss = cross_entropy(y.dims() > 2 ? flatten(y, 0, -2) : y, in[1]);
      }
      backward(loss);
      optimizer.step();
      return std::vector{loss};
    };
    auto compiled = compile(train, {.whole_graph = true, .backend = codegen::fused()});
    Replayed replay(way == Way::kReplayed ? train : Replayed::Function([&](const std::vector<Tensor>& in) {
      return compiled(in);
    }));
    std::vector<Tensor> in = {x, target};
    const auto step = [&] { (void)(way == Way::kEager ? train(in) : replay(in)); };
    allocator.reset_peak();
    const auto start = Clock::now();
    step();
    synchronize(kGpu);
    result.first_s = std::chrono::duration<double>(Clock::now() - start).count();
    for (int i = 0; i < 3; ++i) step();
    if (way != Way::kEager) in = replay.inputs_like(in);  // replays alone are measured
    result.ms = measure(step, steps);
    result.peak_gib = static_cast<double>(allocator.stats().peak_bytes) / (1 << 30);
  });
  return result;
}

// What a command of the peers prints; empty when it cannot run, and the output says so.
std::string output_of(const std::string& command, const char* peer) {
  std::string text;
  FILE* const pipe = popen(command.c_str(), "r");
  char piece[4096];
  while (pipe && std::fgets(piece, sizeof(piece), pipe)) text += piece;
  if (!pipe || pclose(pipe) != 0) {
    fmt::print("({}: left out; this cannot run: {})\n", peer, command);
    return {};
  }
  return text;
}

// The milliseconds in a line "NAME: parts … = 51.30 ms -> …"; 0 when there is no such line.
double floor_ms(const std::string& text, const std::string& name) {
  const size_t line = text.find(name + ": parts");
  if (line == std::string::npos) return 0;
  const size_t at = text.find("= ", line);
  return at == std::string::npos ? 0 : std::stod(text.substr(at + 2));
}

void add_torch(const Options& options, const GpuCase& c, std::map<std::string, double>& peers) {
  const std::string file =
      (std::filesystem::temp_directory_path() / fmt::format("chorale_gpu_{}.json", getpid())).string();
  const std::string command = fmt::format("{} {}/torch_gpu.py --only {} --steps {} --json {} 2>&1", options.python,
                                          peers_folder(), c.model, options.steps, file);
  if (output_of(command, "torch").empty()) return;
  const auto rows = nlohmann::json::parse(std::ifstream(file));
  for (const auto& row : rows) {
    const bool eager = row["case"].get<std::string>().ends_with("/eager");
    peers[eager ? "torch" : "compiled"] = row["ms"];
  }
  std::filesystem::remove(file);
}

void run(const Options& options) {
  std::vector<std::string> names;
  for (const GpuCase& c : kCases) {
    for (const Way way : kWays) {
      if (way != Way::kFp8 || c.head) names.push_back(case_name(c, way));
    }
  }
  check_only(options.only, names);
  runtime_of(kGpu);  // says what is missing
  const auto beside = [&](const char* peer) { return options.against.find(peer) != std::string::npos; };
  CHORALE_CHECK(options.against.empty() || options.against == "none" || !peers_folder().empty(),
                "[bench] bench/peers is not beside this program: run it from a checkout, or with --against none");
  std::string with_floor;  // the names of those that are picked
  for (const GpuCase& c : kCases) {
    if (c.floor && is_any_picked(options, c)) with_floor += fmt::format(" {}", c.floor);
  }
  const std::string floor =
      beside("floor") && !with_floor.empty()
          ? output_of(fmt::format("{} {}/gpu_floor.py{} 2>&1", options.python, peers_folder(), with_floor), "floor")
          : "";
  fmt::print("{:<22} {:>10} {:>14} {:>9} {:>8} {:>10} {:>10} {:>10}\n", "case", "ms", "items/s", "peak GiB", "first s",
             "PyTorch", "compiled", "floor");
  std::vector<BenchRow> rows;
  for (const GpuCase& c : kCases) {
    if (!is_any_picked(options, c)) continue;
    std::map<std::string, double> peers;
    if (beside("torch")) add_torch(options, c, peers);
    if (c.floor && floor_ms(floor, c.floor) > 0) peers["floor"] = floor_ms(floor, c.floor);
    for (const Way way : kWays) {
      if (!is_picked(options, c, way)) continue;
      const Measured ours = measure_ours(c, way, options.steps * c.more_steps);
      BenchRow row{.name = case_name(c, way), .unit = "ms", .ours = ours.ms, .peers = peers};
      row.extra = {{"items_per_s", static_cast<double>(c.items) / ours.ms * 1e3},
                   {"peak_gib", ours.peak_gib},
                   {"first_s", ours.first_s}};
      const auto peer = [&](const char* name) {
        return peers.contains(name) ? fmt::format("{:>10.3f}", peers.at(name)) : fmt::format("{:>10}", "-");
      };
      fmt::print("{:<22} {:>10.3f} {:>14.0f} {:>9.1f} {:>8.1f} {} {} {}\n", row.name, ours.ms,
                 static_cast<double>(c.items) / ours.ms * 1e3, ours.peak_gib, ours.first_s, peer("torch"),
                 peer("compiled"), peer("floor"));
      std::fflush(stdout);
      rows.push_back(std::move(row));
    }
  }
  if (!options.json.empty()) write_json(options.json, bench_report("gpu", rows));
}

}  // namespace
}  // namespace bench_gpu

void add_bench_gpu(CLI::App& bench, Work& work) {
  using namespace bench_gpu;
  CLI::App* command = bench.add_subcommand("gpu", "Training steps on one GPU, beside PyTorch and the vendor's kernels");
  auto options = std::make_shared<Options>();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command->add_option("--against", options->against, "peers, among torch and floor; or none")
      ->check(one_of_peers({"torch", "floor"}))
      ->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name: resnet50, resnet50/compiled");
  command->add_option("--steps", options->steps, "steps that are measured; fifty times as many of the small models")
      ->capture_default_str()
      ->check(between(5, 1e6));
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
