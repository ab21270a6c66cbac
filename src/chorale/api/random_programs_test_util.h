// Random programs: a generator, and what compiling one gets wrong.
#pragma once

#include <cmath>
#include <random>
#include <sstream>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"

namespace chorale::random_programs {

struct Step {
  int kind, a, b, detail;
};
using Program = std::vector<Step>;

inline constexpr const char* kNames[] = {"unary",  "binary", "matmul", "reduce", "view",         "in place", "cat",
                                         "random", "value",  "state",  "detach", "write a view", "size"};
inline constexpr int kKinds = static_cast<int>(std::size(kNames));

inline std::string text_of(const Program& program) {
  std::ostringstream text;
  for (const Step& step : program) {
    text << "  {" << step.kind << ", " << step.a << ", " << step.b << ", " << step.detail << "},  // "
         << kNames[step.kind] << '\n';
  }
  return text.str();
}

// What programs work on: matrices of so many columns.
struct Kind {
  DType dtype = DType::kF64;
  int64_t columns = 3;
  double tolerance = 1e-12;
};

inline Tensor wave(const Shape& sizes, DType dtype, double scale, double shift = 0) {
  std::vector<double> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * std::sin(1.7 * static_cast<double>(i) + shift);
  return to(Tensor::from<double>(values, sizes), dtype);
}

struct Inputs {
  explicit Inputs(const Kind& kind)
      : w(set_requires_grad(wave({kind.columns, kind.columns}, kind.dtype, 0.6, 0.4))),
        b(set_requires_grad(wave({kind.columns}, kind.dtype, 0.2, 0.9))),
        state(zeros({kind.columns}, kind.dtype)) {}
  Tensor w, b, state;
};

// The last few tensors of the pool are the results. Every step looks at sizes, which decide what it does.
inline std::vector<Tensor> interpret(const Program& program, const Inputs& in, const Tensor& x) {
  std::vector<Tensor> pool{x, mul(in.w, 1), add(x, in.b)};
  const auto at = [&](int i) -> Tensor& { return pool[static_cast<size_t>(i) % pool.size()]; };
  for (const Step& step : program) {
    const Tensor a = at(step.a), b = at(step.b);
    Tensor made;
    switch (step.kind) {
      case 0:
        made = step.detail % 4 == 0   ? tanh(a)
               : step.detail % 4 == 1 ? sigmoid(a)
               : step.detail % 4 == 2 ? neg(a)
                                      : square(a);
        break;
      case 1:
        made = a.sizes() == b.sizes() ? (step.detail % 2 ? mul(a, b) : add(a, b)) : sub(a, 0.25);
        break;
      case 2:
        made = a.size(1) == b.size(1) ? matmul(a, t(b)) : matmul(a, t(a));
        made = tanh(made);
        break;
      case 3:
        made = step.detail % 3 == 0   ? softmax(a, 1)
               : step.detail % 3 == 1 ? expand(mean(a, {1}, true), a.sizes())
                                      : sum(a, {0}, true);
        break;
      case 4:
        made = step.detail % 4 == 0   ? t(a)
               : step.detail % 4 == 1 ? narrow(a, 1, 0, std::max<int64_t>(1, a.size(1) - 1))
               : step.detail % 4 == 2 ? unsqueeze(select(a, 0, 0), 0)
                                      : reshape(a, {1, a.elems()});
        break;
      case 5: {
        made = clone(a);
        if (step.detail % 2) {
          mul_(made, 0.5);
        } else {
          add_(made, 1.5);
        }
        break;
      }
      case 6:
        made = a.size(1) == b.size(1) && a.size(0) + b.size(0) < 12 ? cat({a, b}, 0) : a;
        break;
      case 7:
        made = step.detail % 2 ? dropout(a, 0.5) : add(a, uniform(a.sizes(), 0, 1, a.dtype()));
        break;
      case 8:
        // Host code that wants a value: a break.
        made = step.detail < 100 && sum(a).item<double>() > 0 ? mul(a, 0.5) : add(a, 0.125);
        break;
      case 9: {
        const NoGrad quiet;
        add_(in.state, mean(detach(a)));
        made = add(a, in.state.size(0) == a.size(1)  ? in.state
                      : in.b.size(0) == in.w.size(0) ? narrow(in.state, 0, 0, 1)
                                                     : in.state);
        break;
      }
      case 10:
        made = add(detach(a), a);
        break;
      case 12: {
        // A size in a number, in an attribute, and in a branch.
        const int64_t rows = a.size(0);
        made = step.detail % 3 == 0   ? mul(a, 1.0 / static_cast<double>(rows))
               : step.detail % 3 == 1 ? narrow(cat({a, a}, 0), 0, rows / 2, rows)
               : rows > 4             ? neg(a)
                                      : add(a, 0.5);
        break;
      }
      default: {
        made = mul(a, 1);
        fill_(step.detail % 2 ? select(made, 0, 0) : narrow(t(made), 0, 0, 1), 0.75);
        break;
      }
    }
    pool.push_back(made);
  }
  return {pool.end() - std::min<int64_t>(3, static_cast<int64_t>(pool.size())), pool.end()};
}

struct Outcome {
  std::vector<std::vector<double>> values;
  bool failed = false;
  int resizes = 0;
};

// Nothing, or what differs first.
inline std::string difference(const Outcome& is, const Outcome& expected, double tolerance) {
  if (is.failed || expected.failed)
    return is.failed == expected.failed ? "" : is.failed ? "it failed" : "it did not fail";
  if (is.values.size() != expected.values.size()) return "another number of results";
  for (size_t i = 0; i < is.values.size(); ++i) {
    const std::vector<double>&a = is.values[i], &b = expected.values[i];
    if (a.size() != b.size()) return concat("value ", i, " has ", a.size(), " elements, expected ", b.size());
    for (size_t k = 0; k < a.size(); ++k) {
      if (!(std::abs(a[k] - b[k]) <= tolerance * (1 + std::abs(b[k])))) {
        return concat("element ", k, " of value ", i, " is ", a[k], ", expected ", b[k]);
      }
    }
  }
  return {};
}

// Rows of the argument, call by call: the first size again, a second one, others, and one that is never a symbol.
inline constexpr int64_t kRows[] = {2, 2, 5, 3, 7, 1, 3};

template <class F>
Outcome outcome_of(const Kind& kind, F&& make) {
  Outcome outcome;
  const Inputs in(kind);
  manual_seed(11);
  try {
    auto f = make(in);
    for (int call = 0; call < static_cast<int>(std::size(kRows)); ++call) {
      set_gradient(in.w, {});
      set_gradient(in.b, {});
      const Tensor x = set_requires_grad(wave({kRows[call], kind.columns}, kind.dtype, 1, 0.1 * call));
      const std::vector<Tensor> out = f(x);
      Tensor loss;
      for (const Tensor& y : out) {
        outcome.values.push_back(to(y, DType::kF64).to_vector<double>());
        if (requires_grad(y)) loss = loss.defined() ? add(loss, sum(square(y))) : sum(square(y));
      }
      if (loss.defined()) backward(loss);
      for (const Tensor& leaf : {in.w, in.b, x}) {
        outcome.values.push_back(gradient(leaf).defined() ? to(gradient(leaf), DType::kF64).to_vector<double>()
                                                          : std::vector<double>{});
      }
      outcome.values.push_back(to(in.state, DType::kF64).to_vector<double>());
      if constexpr (requires { f.frame(); }) outcome.resizes = explain(f).resizes;
    }
  } catch (const StateError&) {  // such as: a gradient needs what was overwritten
    outcome.failed = true;
  }
  return outcome;
}

inline std::string mistake(const Program& program, const CompileOptions& options, const Kind& kind,
                           int* resizes = nullptr) {
  const auto run = [&](const Inputs& in) { return [&](const Tensor& x) { return interpret(program, in, x); }; };
  const Outcome eager = outcome_of(kind, run);
  const Outcome is = outcome_of(kind, [&](const Inputs& in) { return compile(run(in), options); });
  if (resizes) *resizes += is.resizes;
  return difference(is, eager, kind.tolerance);
}

inline Program random_program(uint64_t seed, bool whole) {
  std::mt19937_64 random(seed);
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  Program program;
  for (int i = 5 + up_to(56); i > 0; --i) {
    Step step{up_to(kKinds), up_to(64), up_to(64), up_to(64)};
    if (whole && step.kind == 8) step.detail = 100;  // no value is asked for
    program.push_back(step);
  }
  return program;
}

inline Program shrink(Program program, const CompileOptions& options, const Kind& kind) {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t i = 0; i < program.size(); ++i) {
      Program without = program;
      without.erase(without.begin() + static_cast<int64_t>(i));
      if (mistake(without, options, kind).empty()) continue;
      program = std::move(without);
      smaller = true;
      break;
    }
  }
  return program;
}

}  // namespace chorale::random_programs
