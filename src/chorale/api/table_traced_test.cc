// The table tests of tracing: every row, traced, gives what it gives eagerly; values and gradients, in every contract.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/api/table_test_util.h"
#include "chorale/base/error.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

// Rows whose gradient has a shape that depends on data: it cannot be traced.
bool has_dynamic_gradient(const OpDef& row) { return std::string_view(row.name) == "masked_scatter"; }

// A collective runs by itself, between graphs.
bool is_collective(const OpDef& row) { return std::strstr(row.inputs, "group") != nullptr; }

class TracedTable : public testing::TestWithParam<const OpDef*> {};

bool has_sparse(const Sample& sample) {
  for (const Tensor& x : sample.in) {
    if (x.defined() && x.is_sparse()) return true;
  }
  return false;
}

// Two ops before and one behind the row: it reads traced values, and its results are read.
std::vector<Tensor> program(const OpDef& row, const std::vector<Tensor>& in, const Attrs& attrs) {
  std::vector<Tensor> operands;
  operands.reserve(in.size());
  for (const Tensor& x : in) {
    operands.push_back(x.defined() && is_floating(x.dtype()) ? mul(add(x, 0.0), 1.0) : x);
  }
  std::vector<Tensor> out = run(row, operands, attrs);
  for (Tensor& y : out) {
    if (is_differentiable(y.dtype())) y = mul(y, 2.0);
  }
  return out;
}

std::vector<Tensor> leaves(const OpDef& row, const Sample& sample, const std::vector<Tensor>& in, bool grad) {
  std::vector<Tensor> result = copies(in);
  for (size_t i = 0; i < result.size(); ++i) {
    const bool has = grad && result[i].defined() && is_floating(result[i].dtype()) && !sample.constant.has(i) &&
                     row.grad != not_differentiable;
    if (has) set_requires_grad(result[i]);
  }
  return result;
}

// Forward and backward by hand, as a user would: gradients of leaves.
std::vector<Tensor> differentiate(const std::vector<Tensor>& out, const std::vector<Tensor>& in) {
  Tensor loss;
  for (const Tensor& y : out) {
    if (!requires_grad(y)) continue;
    const Tensor part = sum(is_complex(y.dtype()) ? square(abs(y)) : square(y));
    loss = loss.defined() ? add(loss, part) : part;
  }
  if (loss.defined()) backward(loss);
  std::vector<Tensor> gradients;
  gradients.reserve(in.size());
  for (const Tensor& x : in) gradients.push_back(x.defined() && requires_grad(x) ? gradient(x) : Tensor{});
  return gradients;
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << what << " " << i;
    if (!a[i].defined()) continue;
    ASSERT_EQ(a[i].dtype(), b[i].dtype()) << what << " " << i;
    expect_close(a[i], b[i], 1e-12, what + " " + std::to_string(i));
  }
}

std::vector<std::vector<Tensor>> layouts(const std::vector<Tensor>& in) {
  return {in, relayout(in, Layout::kReversedDims), relayout(in, Layout::kEverySecond)};
}

TEST_P(TracedTable, EqualsEager) {
  const OpDef& row = *GetParam();
  if (is_collective(row)) return;
  for (const Sample& sample : row.samples()) {
    if (has_sparse(sample)) continue;
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      for (const std::vector<Tensor>& in : layouts(cast_inputs(sample.in, dtype))) {
        bool fits = true;
        for (const Tensor& x : in) fits &= !x.defined() || &x != &in[0] || row.dtypes.has(x.dtype());
        if (!fits) continue;
        const std::string what = describe(row, sample);
        SCOPED_TRACE(what);
        const bool grad = sample.grad && row.grad != not_differentiable;
        const auto eager_in = leaves(row, sample, in, grad);
        const auto eager = program(row, eager_in, sample.attrs);
        const auto eager_gradients = differentiate(eager, eager_in);
        for (const bool whole : {false, true}) {
          if (whole && (row.dynamic || has_dynamic_gradient(row))) continue;
          const auto traced_in = leaves(row, sample, in, grad);
          auto function =
              compile([&](const std::vector<Tensor>& operands) { return program(row, operands, sample.attrs); },
                      {.whole_graph = whole});
          std::vector<Tensor> traced;
          for (int call = 0; call < 2; ++call) {
            for (const Tensor& x : traced_in) {
              if (x.defined()) set_gradient(x, {});
            }
            traced = function(traced_in);
            expect_same(traced, eager, what + (whole ? " whole" : " segmented"));
            if (HasFatalFailure()) return;
            expect_same(differentiate(traced, traced_in), eager_gradients, what + " gradients");
          }
          const compiled::Report report = explain(function);
          if (!row.dynamic && !has_dynamic_gradient(row)) {
            EXPECT_EQ(report.compiles, 1) << what;
            EXPECT_EQ(report.breaks.size(), 0u) << what;
          }
          for (const auto& graph : report.graphs) {
            const graph::Graph parsed = graph::parse(graph.text);
            EXPECT_EQ(graph::print(parsed), graph.text);
            graph::verify(parsed);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The whole of it, gradients too, inside of the compiled function.
TEST_P(TracedTable, EqualsEagerWithBackwardInside) {
  const OpDef& row = *GetParam();
  if (row.grad == not_differentiable || row.dynamic || has_dynamic_gradient(row) || is_collective(row)) return;
  for (const Sample& sample : row.samples()) {
    if (has_sparse(sample) || !sample.grad) continue;
    const std::string what = describe(row, sample);
    SCOPED_TRACE(what);
    const auto step = [&](const std::vector<Tensor>& in) {
      for (const Tensor& x : in) {
        if (x.defined()) set_gradient(x, {});
      }
      return differentiate(program(row, in, sample.attrs), in);
    };
    const auto eager = step(leaves(row, sample, sample.in, true));
    for (const bool whole : {false, true}) {
      const auto in = leaves(row, sample, sample.in, true);
      auto function = compile(step, {.whole_graph = whole});
      for (int call = 0; call < 2; ++call) expect_same(function(in), eager, what + (whole ? " whole" : " segmented"));
      EXPECT_EQ(explain(function).compiles, 1) << what;
      if (HasFailure()) return;
    }
  }
}

// Inputs whose dimensions of size `from` are `to` long, their elements repeated.
std::vector<Tensor> at_size(const std::vector<Tensor>& in, int64_t from, int64_t to) {
  std::vector<Tensor> result;
  for (const Tensor& x : in) {
    Tensor y = x;
    for (int64_t d = 0; y.defined() && d < y.dims(); ++d) {
      if (x.size(d) != from) continue;
      std::vector<int64_t> rows;
      for (int64_t i = 0; i < to; ++i) rows.push_back(i % from);
      y = index_select(y, d, Tensor::from(rows, {to}));
    }
    result.push_back(y);
  }
  return result;
}

// Attributes in which `to` stands for `from` in lists of sizes.
Attrs at_size(const Attrs& attrs, int64_t from, int64_t to) {
  Attrs result = attrs;
  if (!attrs.type()) return result;
  for (const kernel::Field& field : attrs.type()->fields) {
    if (field.kind != kernel::FieldKind::kInts) continue;
    auto list = std::get<std::vector<int64_t>>(attrs.at(field));
    std::replace(list.begin(), list.end(), from, to);
    result.set(field.name, list);
  }
  return result;
}

bool is_accepted(const OpDef& row, const Sample& sample, const std::vector<Tensor>& in, const Attrs& attrs) {
  try {
    const auto operands = leaves(row, sample, in, sample.grad);
    differentiate(program(row, operands, attrs), operands);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

// Rows whose samples may have no other size. The first are made from attributes alone: sizes reach them as integers
// (DynamicSizes.AnIntegerArgumentMayBeASymbol). The list may only shrink.
const std::set<std::string_view> kNoOtherSize = {
    "full",     "arange",          "linspace",       "eye", "uniform", "normal", "randint",
    "randperm", "unfold_backward", "next_loss_scale"};
// Rows of which some sample is compiled for each size. The list may only shrink.
const std::set<std::string_view> kSpecialises = {"convolution", "qr",       "var",      "std",
                                                 "unfold",      "diagonal", "max_pool", "avg_pool"};

// Two sizes are compiled, the second one with a symbol, and two more are not: values and gradients are eager's at all.
TEST_P(TracedTable, HoldsAtOtherSizes) {
  const OpDef& row = *GetParam();
  if (row.dynamic || has_dynamic_gradient(row) || is_collective(row)) return;
  std::string why;
  int held = 0, specialised = 0;
  const std::vector<Sample> samples = row.samples();
  for (size_t s = 0; s < std::min<size_t>(4, samples.size()); ++s) {
    const Sample& sample = samples[s];
    if (has_sparse(sample)) continue;
    std::set<int64_t> sizes;
    for (const Tensor& x : sample.in) {
      if (x.defined()) sizes.insert(x.sizes().begin(), x.sizes().end());
    }
    for (const int64_t from : sizes) {
      if (from < 2) continue;
      const int64_t to[] = {from, from + 4, from * 3, from + 9};
      for (const bool with_attrs : {false, true}) {
        const auto attrs = [&](int64_t n) { return with_attrs ? at_size(sample.attrs, from, n) : sample.attrs; };
        if (!std::all_of(std::begin(to), std::end(to),
                         [&](int64_t n) { return is_accepted(row, sample, at_size(sample.in, from, n), attrs(n)); })) {
          continue;
        }
        Attrs now = sample.attrs;
        auto function = compile([&](const std::vector<Tensor>& operands) { return program(row, operands, now); },
                                {.whole_graph = true});
        const bool grad = sample.grad && row.grad != not_differentiable;
        for (const int64_t n : to) {
          const std::string what = describe(row, sample) + " at " + std::to_string(n) + " for " + std::to_string(from);
          now = attrs(n);
          const auto eager_in = leaves(row, sample, at_size(sample.in, from, n), grad);
          const auto traced_in = leaves(row, sample, at_size(sample.in, from, n), grad);
          const auto eager = program(row, eager_in, now), traced = function(traced_in);
          expect_same(traced, eager, what);
          expect_same(differentiate(traced, traced_in), differentiate(eager, eager_in), what + " gradients");
          if (HasFatalFailure()) return;
        }
        const compiled::Report report = explain(function);
        if (report.compiles == 2) {
          ++held;
        } else {
          ++specialised;
          why = describe(row, sample) + ": " + (report.recompiles.empty() ? "" : report.recompiles.back());
        }
        break;
      }
    }
  }
  EXPECT_EQ(held + specialised == 0, kNoOtherSize.count(row.name) > 0) << row.name;
  EXPECT_EQ(specialised > 0, kSpecialises.count(row.name) > 0) << row.name << ": " << why;
}

INSTANTIATE_TEST_SUITE_P(Rows, TracedTable, testing::ValuesIn(all_ops().begin(), all_ops().end()),
                         [](const auto& row) { return std::string(row.param->name); });

}  // namespace
}  // namespace chorale::op
