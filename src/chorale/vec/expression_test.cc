// The expressions as values say what the vector loops compute: each is evaluated term by term with the standard
// library, which shares no code with the loops, and compared with the f64 loop.
#include "chorale/vec/expression.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>

#include "chorale/vec/loops.h"

namespace chorale::vec {
namespace {

using Args = const double*;
using Function = std::function<double(Args)>;

// The vocabulary for one f64; truth values are 0 and 1.
const std::map<std::string_view, Function>& vocabulary() {
  static const std::map<std::string_view, Function> words{
      {"add", [](Args a) { return a[0] + a[1]; }},
      {"sub", [](Args a) { return a[0] - a[1]; }},
      {"mul", [](Args a) { return a[0] * a[1]; }},
      {"div", [](Args a) { return a[0] / a[1]; }},
      {"fma", [](Args a) { return std::fma(a[0], a[1], a[2]); }},
      {"neg", [](Args a) { return -a[0]; }},
      {"abs", [](Args a) { return std::abs(a[0]); }},
      {"sign", [](Args a) { return double((a[0] > 0) - (a[0] < 0)); }},
      {"min", [](Args a) { return std::fmin(a[0], a[1]); }},
      {"max", [](Args a) { return std::fmax(a[0], a[1]); }},
      {"sqrt", [](Args a) { return std::sqrt(a[0]); }},
      {"floor", [](Args a) { return std::floor(a[0]); }},
      {"ceil", [](Args a) { return std::ceil(a[0]); }},
      {"round", [](Args a) { return std::nearbyint(a[0]); }},
      {"trunc", [](Args a) { return std::trunc(a[0]); }},
      {"trunc_divide", [](Args a) { return std::trunc(a[0] / a[1]); }},
      {"floor_divide", [](Args a) { return std::floor(a[0] / a[1]); }},
      {"remainder", [](Args a) { return a[0] - a[1] * std::floor(a[0] / a[1]); }},
      {"exp", [](Args a) { return std::exp(a[0]); }},
      {"exp2", [](Args a) { return std::exp2(a[0]); }},
      {"expm1", [](Args a) { return std::expm1(a[0]); }},
      {"log", [](Args a) { return std::log(a[0]); }},
      {"log2", [](Args a) { return std::log2(a[0]); }},
      {"log10", [](Args a) { return std::log10(a[0]); }},
      {"log1p", [](Args a) { return std::log1p(a[0]); }},
      {"sin", [](Args a) { return std::sin(a[0]); }},
      {"cos", [](Args a) { return std::cos(a[0]); }},
      {"tan", [](Args a) { return std::tan(a[0]); }},
      {"tanh", [](Args a) { return std::tanh(a[0]); }},
      {"erf", [](Args a) { return std::erf(a[0]); }},
      {"pow", [](Args a) { return std::pow(a[0], a[1]); }},
      {"angle", [](Args a) { return a[0] < 0 ? std::acos(-1.0) : 0.0; }},
      {"sigmoid", [](Args a) { return 1 / (1 + std::exp(-a[0])); }},
      {"normal_cdf", [](Args a) { return 0.5 * std::erfc(-a[0] / std::sqrt(2.0)); }},
      {"eq", [](Args a) { return double(a[0] == a[1]); }},
      {"ne", [](Args a) { return double(a[0] != a[1]); }},
      {"lt", [](Args a) { return double(a[0] < a[1]); }},
      {"le", [](Args a) { return double(a[0] <= a[1]); }},
      {"gt", [](Args a) { return double(a[0] > a[1]); }},
      {"ge", [](Args a) { return double(a[0] >= a[1]); }},
      {"and_", [](Args a) { return double(a[0] != 0 && a[1] != 0); }},
      {"or_", [](Args a) { return double(a[0] != 0 || a[1] != 0); }},
      {"xor_", [](Args a) { return double((a[0] != 0) != (a[1] != 0)); }},
      {"select", [](Args a) { return a[0] != 0 ? a[1] : a[2]; }},
      {"isnan", [](Args a) { return double(std::isnan(a[0])); }},
      {"isinf", [](Args a) { return double(std::isinf(a[0])); }},
      {"isfinite", [](Args a) { return double(std::isfinite(a[0])); }},
  };
  return words;
}

double evaluate(const Expression& expression, Args in, Args params) {
  std::vector<double> values;
  for (const Term& term : expression.terms) {
    if (term.kind == Term::Kind::kInput) {
      values.push_back(in[term.index]);
    } else if (term.kind == Term::Kind::kParam) {
      values.push_back(params[term.index]);
    } else if (term.kind == Term::Kind::kNumber) {
      values.push_back(term.number);
    } else {
      double args[3] = {};
      for (size_t i = 0; i < term.arg_count; ++i) args[i] = values[term.args[i]];
      values.push_back(vocabulary().at(term.function)(args));
    }
  }
  return values.back();
}

TEST(Expression, SaysWhatTheLoopOfEveryFloatingOperationComputes) {
  int compared = 0;
  for (int i = 0; i < kScalarOpCount; ++i) {
    const auto op = static_cast<ScalarOp>(i);
    const Loop loop = pointwise_loop(op, DType::kF64);
    if (!loop) continue;
    SCOPED_TRACE(info(op).name);
    // Between 0.1 and 3, so that logarithms and quotients stay away from their edges; the third input tells the others
    // apart.
    const double points[][3] = {{0.7, 1.9, 0.3}, {2.6, 0.4, 0.9}, {1.3, 1.3, 0.1}, {0.25, 2.75, 0.6}};
    for (const auto& point : points) {
      Params params;
      const double numbers[] = {0.75, 2.25, 0, 0};
      for (size_t k = 0; k < 2; ++k) params.f[k] = numbers[k];
      double in[3] = {point[0], point[1], point[2]};
      uint8_t condition = point[0] > 1;
      const void* operands[3] = {&in[0], &in[1], &in[2]};
      if (info(op).kind == ScalarKind::kMasked) {
        operands[0] = &condition;
        in[0] = condition;
      }
      double result = 0;
      uint8_t truth = 0;
      const bool is_predicate = info(op).kind == ScalarKind::kPredicate;
      loop(operands, is_predicate ? static_cast<void*>(&truth) : &result, 1, params);
      const double expected = evaluate(expression_of(op), in, numbers);
      EXPECT_NEAR(is_predicate ? truth : result, expected, 1e-13 * (1 + std::abs(expected))) << text_of(op);
      ++compared;
    }
  }
  EXPECT_GT(compared, 4 * 80);
}

TEST(Expression, EveryOperationReadsAllItsInputsAndEqualPartsOnce) {
  for (int i = 0; i < kScalarOpCount; ++i) {
    const auto op = static_cast<ScalarOp>(i);
    const Expression& expression = expression_of(op);
    uint32_t seen = 0;
    for (size_t at = 0; at < expression.terms.size(); ++at) {
      const Term& term = expression.terms[at];
      if (term.kind == Term::Kind::kInput) seen |= 1u << term.index;
      for (size_t k = 0; k < term.arg_count; ++k) EXPECT_LT(term.args[k], at) << info(op).name;
    }
    EXPECT_EQ(seen, (1u << info(op).input_count) - 1) << info(op).name << ": " << text_of(op);
  }
  // x, sigmoid(x), mul: the argument of silu is read once.
  EXPECT_EQ(expression_of(ScalarOp::kSilu).terms.size(), 3u);
  // x * x once, not three times.
  const auto squares = [](const Expression& e) {
    return std::count_if(e.terms.begin(), e.terms.end(),
                         [](const Term& t) { return t.function == "mul" && t.args[0] == t.args[1]; });
  };
  EXPECT_EQ(squares(expression_of(ScalarOp::kGeluTanhBackward)), 1);
}

}  // namespace
}  // namespace chorale::vec
