// `chorale bench guards`: what it costs to find the graph of a compiled step, by the number of tensors that its guards
// look at. The bar: 0.3 microseconds and 10 nanoseconds per tensor.
#include "chorale/app/bench/guards.h"

#include <fmt/format.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/options.h"

namespace chorale::app {
namespace bench_guards {
namespace {

struct Options {
  std::string json, only;
  int rounds = 7;
};

constexpr int64_t kTensors[] = {1, 10, 100, 400, 1000};

void run(const Options& options) {
  std::vector<std::string> names;
  for (const int64_t tensors : kTensors) names.push_back(fmt::format("guards/{}", tensors));
  check_only(options.only, names);
  std::vector<BenchRow> rows;
  fmt::print("{:<16} {:>10} {:>10} {:>8}\n", "", "ns", "bar ns", "share");
  for (size_t i = 0; i < names.size(); ++i) {
    if (!picks(options.only, names[i])) continue;
    std::vector<Tensor> captured;
    for (int64_t t = 1; t < kTensors[i]; ++t) captured.push_back(set_requires_grad(ones({3, 5})));
    auto step = compile(
        [&](const Tensor& x) {
          Tensor sum = x;
          for (const Tensor& w : captured) sum = add(sum, w);
          return sum;
        },
        {.whole_graph = true});
    const Tensor x = ones({3, 5});
    step(x);
    bool fits = true;
    const auto check = [&] { fits &= step.has_graph_for(x); };
    const int64_t count = calibrate(check, 0.02);
    std::vector<double> times;
    for (int r = 0; r < options.rounds; ++r)
      times.push_back(seconds_of(check, count) * 1e9 / static_cast<double>(count));
    const double bar = 300 + 10 * static_cast<double>(kTensors[i]);
    BenchRow row{names[i], "ns", median(times), {{"bar", bar}}, {{"fits", fits}}};
    fmt::print("{:<16} {:>10.0f} {:>10.0f} {:>8.2f}{}\n", row.name, row.ours, bar, row.ours / bar,
               fits ? "" : "  the graph did not fit");
    rows.push_back(std::move(row));
  }
  if (!options.json.empty()) write_json(options.json, bench_report("guards", rows));
}

}  // namespace
}  // namespace bench_guards

void add_bench_guards(CLI::App& bench, Work& work) {
  using namespace bench_guards;
  CLI::App* command = bench.add_subcommand("guards", "The check of all guards of a compiled step");
  auto options = std::make_shared<Options>();
  command->add_option("--json", options->json, "write the report to this file");
  command->add_option("--only", options->only, "cases with this in their name");
  command->add_option("--rounds", options->rounds, "measurements; the median counts")
      ->capture_default_str()
      ->check(between(1, 1e6));
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app
