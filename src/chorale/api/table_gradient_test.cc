// The gradient of every row against finite differences in f64, first and second derivatives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "chorale/api/table_test_util.h"
#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"

namespace chorale::op {
namespace {

// A real number made of all differentiable outputs with fixed weights, so that one number tests every element.
Tensor projected(const std::vector<Tensor>& out, int seed) {
  Tensor total;
  for (const Tensor& y : out) {
    ++seed;
    if (!is_differentiable(y.dtype()) || y.is_sparse()) continue;
    Tensor part = sum(mul(is_complex(y.dtype()) ? real(y) : y, sample(y.sizes(), seed, 0.5, 1.5)));
    if (is_complex(y.dtype())) part = add(part, sum(mul(imag(y), sample(y.sizes(), seed + 100, 0.5, 1.5))));
    total = total.defined() ? add(total, part) : part;
  }
  return total;
}

// d f / d x by central differences, element by element; for complex x the derivative by the real part plus i times that
// by the imaginary part, which is what gradients mean here.
template <class F>
Tensor numerical_gradient(F&& f, const Tensor& x) {
  constexpr double kStep = 1e-5;
  const NoGrad quiet;
  const Tensor result = Tensor::empty(x.sizes(), x.dtype());
  const int parts = is_complex(x.dtype()) ? 2 : 1;
  auto* elements = static_cast<double*>(x.raw());
  auto* gradients = static_cast<double*>(result.raw());
  for (int64_t i = 0; i < x.elems() * parts; ++i) {
    const double before = elements[i];
    elements[i] = before + kStep;
    const double above = f();
    elements[i] = before - kStep;
    const double below = f();
    elements[i] = before;
    gradients[i] = (above - below) / (2 * kStep);
  }
  return result;
}

struct Case {
  std::vector<Tensor> in;
  std::vector<Tensor> wanted;  // those inputs whose gradient is checked
};

Case prepare(const Sample& sample) {
  Case result;
  for (size_t i = 0; i < sample.in.size(); ++i) {
    Tensor x = sample.in[i].defined() && !sample.in[i].is_sparse() ? clone(sample.in[i]) : sample.in[i];
    if (x.defined() && !x.is_sparse() && is_differentiable(x.dtype()) && !sample.constant.has(i)) {
      set_requires_grad(x);
      result.wanted.push_back(x);
    }
    result.in.push_back(x);
  }
  return result;
}

class TableGradient : public ::testing::TestWithParam<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }
};

TEST_P(TableGradient, EqualsFiniteDifferences) {
  for (const Sample& sample : row().samples()) {
    if (!sample.grad) continue;
    const Case c = prepare(sample);
    if (c.wanted.empty()) continue;
    const auto value = [&] { return projected(run(row(), c.in, sample.attrs), 1); };
    const auto analytic = grad({value()}, c.wanted);
    for (size_t k = 0; k < c.wanted.size(); ++k) {
      const Tensor numeric = numerical_gradient([&] { return value().item<double>(); }, c.wanted[k]);
      expect_close(analytic[k], numeric, 1e-6, describe(row(), sample) + " gradient " + std::to_string(k));
    }
  }
}

TEST_P(TableGradient, CanBeDifferentiatedAgain) {
  if (!row().twice) return;
  for (const Sample& sample : row().samples()) {
    if (!sample.grad) continue;
    const Case c = prepare(sample);
    if (c.wanted.empty()) continue;
    // The projection of the first derivative, weighted so that it depends on dout too.
    const auto first = [&] {
      const EnableGrad record;
      return grad({square(projected(run(row(), c.in, sample.attrs), 1))}, c.wanted, {.create_graph = true});
    };
    const Tensor total = projected(first(), 50);
    if (!total.defined() || !requires_grad(total)) continue;  // linear through and through
    const auto analytic = grad({total}, c.wanted, {.allow_unused = true});
    for (size_t k = 0; k < c.wanted.size(); ++k) {
      const Tensor numeric = numerical_gradient([&] { return projected(first(), 50).item<double>(); }, c.wanted[k]);
      const Tensor expected = analytic[k].defined() ? analytic[k] : mul(numeric, 0);
      expect_close(expected, numeric, 2e-5, describe(row(), sample) + " second derivative " + std::to_string(k));
    }
  }
}

// What a rule reads must be what the row says it saves: everything else is poisoned between forward and backward.
TEST_P(TableGradient, ReadsOnlyWhatTheRowSaves) {
  for (const Sample& sample : row().samples()) {
    if (!sample.grad || row().view) continue;
    const Case c = prepare(sample);
    if (c.wanted.empty()) continue;
    const auto expected = grad({projected(run(row(), c.in, sample.attrs), 1)}, c.wanted);
    const auto out = run(row(), c.in, sample.attrs);
    const Tensor total = projected(out, 1);
    const auto poison = [](const Tensor& x, bool saved) {
      if (x.defined() && !saved && !x.is_sparse() && x.elems() > 0) {
        std::memset(x.raw(), 0xff, static_cast<size_t>(x.elems()) * x.elem_bytes());
      }
    };
    for (size_t i = 0; i < c.in.size(); ++i) poison(c.in[i], row().saves.in.has(i));
    for (size_t i = 0; i < out.size(); ++i) {
      const bool aliases =
          std::any_of(c.in.begin(), c.in.end(), [&](const Tensor& x) { return x.defined() && x.overlaps(out[i]); });
      poison(out[i], aliases || row().saves.out.has(i));
    }
    const auto got = grad({total}, c.wanted);
    for (size_t k = 0; k < got.size(); ++k)
      expect_close(got[k], expected[k], 0, describe(row(), sample) + " read what it does not save");
  }
}

TEST_P(TableGradient, IsComputedOnlyWhereItIsNeeded) {
  for (const Sample& sample : row().samples()) {
    if (!sample.grad) continue;
    const Case all = prepare(sample);
    if (all.wanted.size() < 2) continue;
    const auto expected = grad({projected(run(row(), all.in, sample.attrs), 1)}, all.wanted);
    for (size_t k = 0; k < all.wanted.size(); ++k) {
      std::vector<Tensor> in;
      Tensor only;
      for (const Tensor& x : all.in) {
        const bool is_it = x.defined() && x.is(all.wanted[k]);
        in.push_back(x.defined() && !x.is_sparse() ? clone(detach(x)) : x);
        if (is_it) only = set_requires_grad(in.back());
      }
      const auto got = grad({projected(run(row(), in, sample.attrs), 1)}, {only});
      expect_close(got[0], expected[k], 1e-12, describe(row(), sample) + " alone");
    }
  }
}

// Rows that show a part of their input: their gradient may be added in its place, which must give what adding the
// rule's gradient gives, and that needs elements that are shown at most once.
TEST(TableParts, AGradientAddedInItsPlaceIsThatOfTheRule) {
  int rows = 0;
  for (const OpDef* row : all_ops()) {
    if (!row->part) continue;
    ++rows;
    ASSERT_TRUE(row->view) << row->name;
    for (const Sample& sample : row->samples()) {
      const Tensor& x = sample.in[0];
      std::vector<double> places(static_cast<size_t>(x.elems()));
      for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<double>(i);
      std::vector<double> shown = run(*row, {Tensor::from(places, x.sizes())}, sample.attrs)[0].to_vector<double>();
      std::sort(shown.begin(), shown.end());
      EXPECT_EQ(std::adjacent_find(shown.begin(), shown.end()), shown.end()) << describe(*row, sample);

      // The same sum twice: with a gradient that is there before that of the part, and by the rule alone.
      const Tensor leaf = set_requires_grad(clone(x)), weights = op::sample(x.sizes(), 7);
      const Tensor y = mul(leaf, 2);
      const Tensor whole = sum(mul(y, weights));
      const Tensor part = projected(run(*row, {y}, sample.attrs), 3);
      const auto together = grad({part, whole}, {leaf}, {.retain_graph = true});
      const auto rule = grad({part}, {leaf}, {.retain_graph = true}), rest = grad({whole}, {leaf});
      expect_close(together[0], add(rule[0], rest[0]), 1e-12, describe(*row, sample));
    }
  }
  EXPECT_GE(rows, 3);
}

std::vector<const OpDef*> differentiable_rows() {
  std::vector<const OpDef*> rows;
  for (const OpDef* row : all_ops()) {
    if (row->grad != not_differentiable) rows.push_back(row);
  }
  return rows;
}
std::string row_name(const ::testing::TestParamInfo<const OpDef*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(Ops, TableGradient, ::testing::ValuesIn(differentiable_rows()), row_name);

}  // namespace
}  // namespace chorale::op
