// `chorale bench ops`: every family of ops beside PyTorch and beside what the machine can do, one thread each, in
// turns. With --busy: all threads beside a program that uses a core, against one thread on the quiet machine; with
// --same-bits: what it costs that bits do not depend on the number of threads.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>

#include "chorale/app/bench/before.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/busy.h"
#include "chorale/app/bench/ops_cases.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/same_bits.h"
#include "chorale/kernel/cpu/dnnl/gemm.h"
#include "chorale/kernel/cpu/dnnl/matmul.h"
#include "chorale/op/functions.h"

namespace chorale::app {
namespace bench_ops {
namespace {

struct Options {
  std::string json;
  std::string python = "python3";
  std::string only;
  std::string against = "torch,memcpy,onednn";
  int rounds = 7;
  std::optional<double> seconds;  // 0.01; more where calls are timed one by one
  bool busy = false, same_bits = false;
  double length() const { return seconds.value_or(busy ? 1 : same_bits ? 0.1 : 0.01); }
};

std::function<void()> prepare(const OpCase& c) {
  std::vector<Tensor> in;
  for (const OpInput& spec : c.in) {
    in.push_back(spec.below > 0 ? randint(0, spec.below, spec.sizes) : to(uniform(spec.sizes, 0.25, 1.75), spec.dtype));
  }
  const OpCall call = op_call(c.op);
  if (!c.grad) return [=] { call(in); };
  for (const Tensor& x : in) {
    if (is_differentiable(x.dtype())) set_requires_grad(x);
  }
  const Tensor seed = ones_like(detach(call(in)));
  return [=] {
    for (const Tensor& x : in) set_gradient(x, {});
    backward(call(in), seed);
  };
}

// The machine's own limit for a case, if it has one: copying as many bytes as the op reads and writes, or oneDNN's
// product.
std::function<void()> limit_of(const OpCase& c, std::string& name) {
  if (c.bytes > 0) {
    name = "memcpy";
    auto from = std::make_shared<std::vector<char>>(c.bytes / 2, 1),
         to = std::make_shared<std::vector<char>>(c.bytes / 2, 2);
    return [=] {
      std::memcpy(to->data(), from->data(), from->size());
      asm volatile("" ::"r"(to->data()) : "memory");
    };
  }
  if (c.op == "matmul" && c.in[0].sizes.size() == 2 && !c.grad && c.in[0].dtype == DType::kF32) {
    name = "onednn";
    const int64_t m = c.in[0].sizes[0], k = c.in[0].sizes[1], n = c.in[1].sizes[1];
    const Tensor a = uniform({m, k}), b = uniform({k, n}), out = empty({m, n});
    kernel::cpu::Product p{.dtype = DType::kF32,
                           .m = m,
                           .n = n,
                           .k = k,
                           .a = a.raw(),
                           .b = b.raw(),
                           .c = out.raw(),
                           .a_row = k,
                           .a_col = 1,
                           .b_row = n,
                           .b_col = 1,
                           .c_row = n,
                           .c_col = 1};
    const auto primitive = [=] {
      static_cast<void>(out);
      kernel::cpu::dnnl::matmul(p, DType::kF32);
      static_cast<void>(a), static_cast<void>(b);
    };
    const auto sgemm = [=] {
      kernel::cpu::dnnl::sgemm(false, false, m, n, k, 1, a.data<float>(), k, b.data<float>(), n, 0, out.data<float>(),
                               n);
    };
    // Its own best: the faster of the two.
    const double first =
        seconds_of(primitive, calibrate(primitive, 0.01)) / static_cast<double>(calibrate(primitive, 0.01));
    const double second = seconds_of(sgemm, calibrate(sgemm, 0.01)) / static_cast<double>(calibrate(sgemm, 0.01));
    if (first < second) return primitive;
    return sgemm;
  }
  return {};
}

nlohmann::json request_for(const OpCase& c, double seconds, bool last) {
  nlohmann::json in = nlohmann::json::array();
  for (const OpInput& spec : c.in) {
    in.push_back({{"sizes", std::vector<int64_t>(spec.sizes.begin(), spec.sizes.end())},
                  {"dtype", spec.below > 0 ? "i64" : std::string(name_of(spec.dtype))},
                  {"below", spec.below}});
  }
  return {
      {"case", {{"case", c.name}, {"op", c.op}, {"in", in}, {"grad", c.grad}}}, {"seconds", seconds}, {"last", last}};
}

std::unique_ptr<PeerProcess> start_torch(const Options& options) {
  if (options.against.find("torch") == std::string::npos) return nullptr;
  const std::string folder = peers_folder();
  if (folder.empty()) {
    fmt::print("PyTorch: left out, bench/peers is not beside this program\n");
    return nullptr;
  }
  try {
    auto peer = std::make_unique<PeerProcess>(std::vector<std::string>{options.python, folder + "/torch_ops.py"});
    fmt::print("PyTorch: {}\n", peer->greeting());
    return peer;
  } catch (const StateError&) {
    fmt::print("PyTorch: left out, {} cannot import it; say where it lives with --torch-python\n", options.python);
    return nullptr;
  }
}

std::string human(double ns) {
  if (ns < 1e3) return fmt::format("{:.0f} ns", ns);
  if (ns < 1e6) return fmt::format("{:.2f} us", ns / 1e3);
  return fmt::format("{:.2f} ms", ns / 1e6);
}

BenchRow measure(const OpCase& c, const Options& options, PeerProcess* torch, std::string& trouble) {
  const auto ours = prepare(c);
  std::string limit_name;
  std::function<void()> limit;
  if (const auto found = limit_of(c, limit_name); found && options.against.find(limit_name) != std::string::npos)
    limit = found;
  const int64_t count = calibrate(ours, options.length()), limit_count = limit ? calibrate(limit, options.length()) : 0;
  std::vector<double> our_ns, torch_ns, limit_ns;
  for (int round = 0; round < options.rounds; ++round) {
    our_ns.push_back(seconds_of(ours, count) / static_cast<double>(count) * 1e9);
    if (limit) limit_ns.push_back(seconds_of(limit, limit_count) / static_cast<double>(limit_count) * 1e9);
    if (torch && trouble.empty()) {
      const std::string answer = torch->ask(request_for(c, options.length(), round + 1 == options.rounds).dump());
      if (answer.starts_with("!")) {
        trouble = answer.substr(2);
      } else {
        torch_ns.push_back(std::stod(answer));
      }
    }
  }
  BenchRow row{.name = c.name, .unit = "ns", .ours = median(our_ns), .peers = {}};
  if (!torch_ns.empty()) row.peers["torch"] = median(torch_ns);
  if (!limit_ns.empty()) row.peers[limit_name] = median(limit_ns);
  row.extra["elements"] = c.elements();
  return row;
}

double geometric_mean(const std::vector<double>& values) {
  double sum = 0;
  for (double v : values) sum += std::log(v);
  return std::exp(sum / static_cast<double>(values.size()));
}

void print_summary(const std::vector<BenchRow>& rows) {
  std::vector<double> all, small, products, bandwidth;
  std::string slow;
  for (const BenchRow& row : rows) {
    if (const auto torch = row.peers.find("torch"); torch != row.peers.end()) {
      const double ratio = torch->second / row.ours;
      all.push_back(ratio);
      if (row.extra["elements"] <= 1000) small.push_back(ratio);
      if (ratio < 0.9) slow += fmt::format("  {} {:.2f}x\n", row.name, ratio);
    }
    if (const auto peer = row.peers.find("onednn"); peer != row.peers.end())
      products.push_back(peer->second / row.ours);
    if (const auto peer = row.peers.find("memcpy"); peer != row.peers.end())
      bandwidth.push_back(peer->second / row.ours);
  }
  fmt::print("\n");
  if (!all.empty())
    fmt::print("against PyTorch, geometric mean: {:.2f}x over {} cases\n", geometric_mean(all), all.size());
  if (!small.empty())
    fmt::print("against PyTorch, up to 1,000 elements: {:.2f}x over {} cases\n", geometric_mean(small), small.size());
  if (!products.empty())
    fmt::print("against oneDNN's own best product: {:.2f}x, worst {:.2f}x\n", geometric_mean(products),
               *std::min_element(products.begin(), products.end()));
  if (!bandwidth.empty())
    fmt::print("share of memcpy's bandwidth: {:.2f}, worst {:.2f}\n", geometric_mean(bandwidth),
               *std::min_element(bandwidth.begin(), bandwidth.end()));
  if (!slow.empty()) fmt::print("slower than 0.9x PyTorch:\n{}", slow);
}

constexpr const char* kOwnCosts[] = {"cost/f32/1", "cost/f32/1/recorded", "cost/f32/1/backward"};

// What a call costs beyond its arithmetic: a chain of products and tanh of one element, without gradients, recorded,
// and going backward. Nobody stands beside it; docs/dev/design.md has the bounds.
std::vector<BenchRow> own_cost(const Options& options) {
  constexpr int kCalls = 200;
  const Tensor start = full({1}, 0.5), factor = full({1}, 2.0), seed = full({1}, 1.0);
  const auto chain = [&] {
    Tensor x = start;
    for (int i = 0; i < kCalls / 2; ++i) x = mul(tanh(x), factor);
    return x;
  };
  const auto ns_per_call = [&](const std::function<void()>& body) {
    std::vector<double> ns;
    ns.reserve(static_cast<size_t>(options.rounds));
    const int64_t count = calibrate(body, options.length());
    for (int round = 0; round < options.rounds; ++round)
      ns.push_back(seconds_of(body, count) / static_cast<double>(count * kCalls) * 1e9);
    return median(ns);
  };
  const double plain = ns_per_call(chain);
  set_requires_grad(start);
  const double recorded = ns_per_call(chain);
  const double both = ns_per_call([&] { backward(chain(), seed); });
  const auto row = [](const char* name, double ns) {
    return BenchRow{.name = name, .unit = "ns", .ours = ns, .peers = {}};
  };
  return {row(kOwnCosts[0], plain), row(kOwnCosts[1], recorded), row(kOwnCosts[2], both - recorded)};
}

void run(const Options& options) {
  std::vector<std::string> names(std::begin(kOwnCosts), std::end(kOwnCosts));
  for (const OpCase& c : op_cases()) names.push_back(c.name);
  check_only(options.only, names);
  set_thread_count(1);
  const auto torch = start_torch(options);
  std::vector<BenchRow> rows;
  fmt::print("{:<44} {:>10} {:>10} {:>8} {:>10} {:>7}\n", "case", "ours", "PyTorch", "ratio", "limit", "share");
  for (const OpCase& c : op_cases()) {
    if (!picks(options.only, c.name)) continue;
    std::string trouble;
    const BenchRow row = measure(c, options, torch.get(), trouble);
    std::string line = fmt::format("{:<44} {:>10}", row.name, human(row.ours));
    const auto peer = row.peers.find("torch");
    line += peer == row.peers.end() ? fmt::format(" {:>10} {:>8}", "-", "-")
                                    : fmt::format(" {:>10} {:>7.2f}x", human(peer->second), peer->second / row.ours);
    for (const char* name : {"memcpy", "onednn"}) {
      if (const auto limit = row.peers.find(name); limit != row.peers.end())
        line += fmt::format(" {:>10} {:>6.2f}  {}", human(limit->second), limit->second / row.ours, name);
    }
    fmt::print("{}{}\n", line, trouble.empty() ? "" : "  (" + trouble + ")");
    std::fflush(stdout);
    rows.push_back(row);
  }
  for (BenchRow& row : own_cost(options)) {
    if (!picks(options.only, row.name)) continue;
    fmt::print("{:<44} {:>10}\n", row.name, human(row.ours));
    rows.push_back(std::move(row));
  }
  print_summary(rows);
  if (!options.json.empty()) write_json(options.json, bench_report("ops", rows));
}

// The median time of a call in nanoseconds.
double median_call(const std::function<void()>& call, double seconds) {
  using Clock = std::chrono::steady_clock;
  call();
  std::vector<double> times;
  const auto start = Clock::now();
  for (auto before = start; times.empty() || before - start < std::chrono::duration<double>(seconds);) {
    call();
    const auto after = Clock::now();
    times.push_back(std::chrono::duration<double, std::nano>(after - before).count());
    before = after;
  }
  return median(times);
}

constexpr double kBurnerBar = 2;

// All cases in two ways, in turns: `plain` and `other` are called before a case is measured.
struct TwoWays {
  const char* bench;
  const char* plain_name;
  const char* other_name;
  std::function<void()> plain, other, after;
  double bar = 0;  // of other/plain; none where it is 0
};

void run_two_ways(const Options& options, const TwoWays& ways) {
  std::vector<std::string> names;
  for (const OpCase& c : op_cases()) names.push_back(c.name);
  check_only(options.only, names);
  std::vector<BenchRow> rows;
  std::vector<double> ratios;
  fmt::print("{:<44} {:>10} {:>10} {:>8}\n", "case", ways.plain_name, ways.other_name, "ratio");
  int over = 0;
  for (const OpCase& c : op_cases()) {
    if (!picks(options.only, c.name)) continue;
    const auto call = prepare(c);
    ways.plain();
    const double plain = median_call(call, options.length());
    ways.other();
    const double other = median_call(call, options.length());
    ways.after();
    const bool misses = ways.bar > 0 && other > ways.bar * plain;
    over += misses;
    fmt::print("{:<44} {:>10} {:>10} {:>7.2f}x{}\n", c.name, human(plain), human(other), other / plain,
               misses ? fmt::format("  more than {}", ways.bar) : "");
    std::fflush(stdout);
    ratios.push_back(other / plain);
    rows.push_back({.name = c.name, .unit = "ns", .ours = other, .peers = {{ways.plain_name, plain}}});
  }
  fmt::print("\n{} against {}, geometric mean: {:.2f}x over {} cases\n", ways.other_name, ways.plain_name,
             geometric_mean(ratios), rows.size());
  if (ways.bar > 0) fmt::print("{} cases take more than {} times as long\n", over, ways.bar);
  if (!options.json.empty()) write_json(options.json, bench_report(ways.bench, rows));
}

void run_busy(const Options& options) {
  const int threads = thread_count();
  std::unique_ptr<Burners> burner;
  fmt::print("one thread alone, and {} beside a thread that uses one core\n", threads);
  run_two_ways(options, {.bench = "ops_busy",
                         .plain_name = "alone",
                         .other_name = "busy",
                         .plain = [] { set_thread_count(1); },
                         .other =
                             [&] {
                               set_thread_count(threads);
                               burner = std::make_unique<Burners>(Burners::on_last_core());
                             },
                         .after = [&] { burner.reset(); },
                         .bar = kBurnerBar});
}

void run_same_bits(const Options& options) {
  fmt::print("{} threads: as is fastest, and with the bits of any number of threads\n", thread_count());
  run_two_ways(options, {.bench = "ops_same_bits",
                         .plain_name = "any bits",
                         .other_name = "same bits",
                         .plain = [] { set_same_bits(false); },
                         .other = [] { set_same_bits(true); },
                         .after = [] { set_same_bits(false); }});
}

}  // namespace
}  // namespace bench_ops

void add_bench_ops(CLI::App& bench, Work& work) {
  using namespace bench_ops;
  CLI::App* command =
      bench.add_subcommand("ops", "Every family of ops, one thread, against PyTorch and the machine's limits");
  auto options = std::make_shared<Options>();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--torch-python", options->python, "a Python that can import torch")->capture_default_str();
  command
      ->add_option("--against", options->against,
                   "peers, among torch, memcpy and onednn; or before=PROGRAM, an older chorale")
      ->check(one_of_peers({"torch", "memcpy", "onednn", "before="}))
      ->capture_default_str();
  command->add_option("--only", options->only, "cases with this in their name");
  command->add_option("--rounds", options->rounds, "measurements of each, in turns; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command
      ->add_option("--seconds", options->seconds,
                   "length of one measurement (0.01; 1 with --busy, 0.1 with --same-bits)")
      ->check(between(1e-6, 3600));
  command->add_flag("--busy", options->busy,
                    "all threads beside a thread that uses one core, against one thread alone; no peers");
  command->add_flag("--same-bits", options->same_bits,
                    "what it costs that results do not depend on the number of threads; no peers");
  command->callback([options, &work] {
    work = [options] {
      if (const std::string before = before_program(options->against); !before.empty())
        return compare_with_before("ops", before, options->json);
      if (options->busy) return run_busy(*options);
      options->same_bits ? run_same_bits(*options) : run(*options);
    };
  });
}

}  // namespace chorale::app
