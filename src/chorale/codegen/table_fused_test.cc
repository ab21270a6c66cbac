// Every row, compiled with fused kernels, gives what it gives eagerly: values and gradients, in f32, bf16 and f64, as
// it lies and transposed. All kernels of all rows are compiled in one call, so everything runs twice: once to see which
// kernels there are, once with them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/api/table_test_util.h"
#include "chorale/codegen/fused.h"
#include "chorale/codegen/render.h"
#include "chorale/op/table.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

using op::OpDef;
using op::Sample;

// Rows that no graph holds: collectives, those whose shapes depend on data, and a gradient that does.
bool is_left_out(const OpDef& row) {
  return std::strstr(row.inputs, "group") || row.dynamic || std::string_view(row.name) == "masked_scatter";
}

// Ops before and behind the row: where it is pointwise, it becomes a part of a kernel.
std::vector<Tensor> program(const OpDef& row, const std::vector<Tensor>& in, const Attrs& attrs) {
  std::vector<Tensor> operands;
  operands.reserve(in.size());
  for (const Tensor& x : in) {
    operands.push_back(x.defined() && is_floating(x.dtype()) ? mul(add(x, 0.0), 1.0) : x);
  }
  std::vector<Tensor> out = op::run(row, operands, attrs);
  for (Tensor& y : out) {
    if (is_floating(y.dtype())) y = add(mul(y, 0.5), 0.25);
  }
  return out;
}

struct Case {
  const OpDef* row;
  Sample sample;
  std::vector<Tensor> in;
  std::string what;
};

bool fits(const OpDef& row, const std::vector<Tensor>& in) {
  for (const Tensor& x : in) {
    if (x.defined() && x.is_sparse()) return false;
  }
  return in.empty() || !in[0].defined() || row.dtypes.has(in[0].dtype());
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const OpDef* row : op::all_ops()) {
    if (is_left_out(*row)) continue;
    const std::vector<Sample> samples = row->samples();
    for (const Sample& sample : samples) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
        std::vector<Tensor> in = op::cast_inputs(sample.in, dtype);
        if (!fits(*row, in)) continue;
        // Other samples differ in shapes and attributes, which matters little here: the first has it all.
        if (&sample != samples.data() && (dtype != DType::kF32 || !row->pointwise)) continue;
        const std::string what = concat(op::describe(*row, sample), " ", dtype);
        if (dtype == DType::kF32 && row->pointwise && &sample == samples.data()) {
          cases.push_back({row, sample, op::relayout(in, op::Layout::kReversedDims), what + " transposed"});
        }
        cases.push_back({row, sample, std::move(in), what});
      }
    }
  }
  return cases;
}

// Results, then gradients.
std::vector<Tensor> outcome(const Case& at, const compiled::Backend& backend) {
  std::vector<Tensor> in = op::copies(at.in);
  const bool has_gradient = at.sample.grad && at.row->grad != op::not_differentiable;
  for (size_t i = 0; i < in.size(); ++i) {
    if (has_gradient && in[i].defined() && is_floating(in[i].dtype()) && !at.sample.constant.has(i)) {
      set_requires_grad(in[i]);
    }
  }
  const auto f = [&](const std::vector<Tensor>& operands) { return program(*at.row, operands, at.sample.attrs); };
  std::vector<Tensor> results = backend ? compile(f, {.whole_graph = true, .backend = backend})(in) : f(in);
  Tensor loss;
  for (const Tensor& y : results) {
    if (!requires_grad(y)) continue;
    const Tensor part = sum(is_complex(y.dtype()) ? square(abs(y)) : square(y));
    loss = loss.defined() ? add(loss, to(part, loss.dtype())) : part;
  }
  if (loss.defined()) backward(loss);
  for (const Tensor& x : in) results.push_back(x.defined() && requires_grad(x) ? gradient(x) : Tensor{});
  return results;
}

// All kernels are compiled in one call. How many there are.
size_t expect_eager_results(const std::vector<Case>& cases, FusedOptions options) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path(), .deadline = std::chrono::minutes(5)});
  options.cache = &cache;
  options.optimize = "-O1";
  std::map<std::string, KernelText> kernels;
  for (const Case& at : cases) {
    outcome(at, [&](graph::Graph graph, const compiled::GraphInfo&) {
      for (const bool with_blocks : {false, options.blocks}) {
        for (KernelText& kernel : kernels_of(simplify_and_fuse(graph, with_blocks)))
          kernels[kernel.name] = std::move(kernel);
      }
      return std::make_shared<const graph::Program>(std::move(graph));
    });
  }
  std::vector<KernelText> all;
  all.reserve(kernels.size());
  for (auto& [name, kernel] : kernels) all.push_back(kernel);
  Toolchain toolchain = find_toolchain();
  std::replace(toolchain.flags.begin(), toolchain.flags.end(), std::string("-O3"), options.optimize);
  std::string why;
  const std::vector<LoadedKernel> loaded = cache.get(toolchain, prelude(), all, why);
  EXPECT_EQ(loaded.size(), all.size()) << why;
  for (const Case& at : cases) {
    if (testing::Test::HasFailure()) break;
    SCOPED_TRACE(at.what);
    const std::vector<Tensor> eager = outcome(at, {}), made = outcome(at, fused(options));
    EXPECT_EQ(eager.size(), made.size());
    for (size_t i = 0; i < eager.size() && i < made.size(); ++i) {
      EXPECT_EQ(eager[i].defined(), made[i].defined()) << i;
      if (eager[i].defined()) op::expect_close(made[i], eager[i], 0, concat(at.what, " ", i));
    }
  }
  EXPECT_EQ(cache.counts().miss, 1) << "kernels that were not there before";
  return all.size();
}

TEST(FusedTable, EveryRowGivesWhatItGivesEagerly) {
  EXPECT_GE(expect_eager_results(all_cases(), {.blocks = false}), 100u);
}

// What a block takes besides elementwise rows, and some of those.
TEST(FusedTable, RowsInBlocksGiveWhatTheyGiveEagerly) {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& at) {
    constexpr const char* names[] = {"linear",      "matmul",     "sum",  "cross_entropy", "cross_entropy_backward",
                                     "update_adam", "update_sgd", "full", "full_like",     "softmax",
                                     "layer_norm",  "relu",       "where"};
    return std::none_of(std::begin(names), std::end(names),
                        [&](const char* name) { return name == std::string_view(at.row->name); });
  });
  EXPECT_GE(expect_eager_results(cases, {}), 10u);
}

}  // namespace
}  // namespace chorale::codegen
