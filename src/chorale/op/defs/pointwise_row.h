// Inside op/defs: how a pointwise row is made, and how the three forms of its function are defined.
#pragma once

#include "chorale/kernel/cpu/pointwise.h"
#include "chorale/op/builder.h"
#include "chorale/op/samples.h"

namespace chorale::op {

using kernel::Promotion;
using vec::ScalarOp;

// ---- attributes. Numbers among them are the parameters p0, p1, … of the expression, in this order.

struct NumberAttrs {
  Scalar value = 0;
};
CHORALE_FIELDS(NumberAttrs, value)
struct BoundsAttrs {
  Scalar min = 0, max = 0;
};
CHORALE_FIELDS(BoundsAttrs, min, max)

// ---- inference

void infer_pointwise(const InferArgs& args, std::span<OutSpec> out);

// ---- samples: of one, two and three floating inputs, with broadcasting

std::vector<Sample> samples_unary();
std::vector<Sample> samples_holomorphic();  // and of a complex one
std::vector<Sample> samples_positive();     // of one input above 0.25
std::vector<Sample> samples_steps();        // of one input away from integers and halves
std::vector<Sample> samples_binary();
std::vector<Sample> samples_bilinear();  // and of complex ones
std::vector<Sample> samples_ternary();
// Two inputs of equal shape, as rows of gradients have them.
std::vector<Sample> samples_backward();

// ---- rows

namespace detail {
constexpr DTypeSet dtypes_of(uint8_t domain, Promotion promotion) {
  DTypeSet dtypes;
  if (domain & vec::domain::F) dtypes = dtypes | kFloats;
  if (domain & vec::domain::C) dtypes = dtypes | kComplexes;
  if (domain & vec::domain::I || promotion == Promotion::kFloat) dtypes = dtypes | kInts | kBools;
  if (domain & vec::domain::B) dtypes = dtypes | kBools;
  return dtypes;
}
}  // namespace detail

// Completes a row: what it says itself stays.
constexpr OpDef pointwise(kernel::Pointwise what, OpDef row) {
  const vec::ScalarInfo& info = vec::info(what.op);
  constexpr const char* names[] = {"x", "x, y", "x, y, z"};
  row.pointwise = what;
  if (!row.infer) row.infer = infer_pointwise;
  row.cpu = kernel::cpu::pointwise;
  row.in_place = true;
  if (!row.shard.labels) row.shard = kShardElementwise;
  if (*row.inputs == '\0') row.inputs = names[info.input_count - 1];
  if (row.dtypes.empty()) row.dtypes = detail::dtypes_of(info.dtypes, what.promotion);
  return row;
}

// Rows that more than one file calls.
extern const OpDef kComplexAbs, kComplexSign;

// Zeros for one input, and for all: the gradient of a step function, where it exists.
Tensor zeros_for(const GradArgs& g, size_t input);
Tensors zero_gradient(const GradArgs& g);
// The gradient of a row whose result is linear in its first input and does not change with the others: f(dy, x…) has
// the gradient f(g, x…) by dy and zeros by x.
template <const OpDef& row>
Tensors passes_first(const GradArgs& g) {
  Tensors in(g.in.begin(), g.in.end()), gradients;
  in[0] = g.dout[0];
  gradients.push_back(g.needs(0) ? call_list(row, g.attrs, {in.data(), in.size()}) : Tensor{});
  for (size_t i = 1; i < in.size(); ++i) gradients.push_back(zeros_for(g, i));
  return gradients;
}

// ---- the forms of a function, from one expression that says to(row, attributes, inputs…)

struct ToNew {
  template <class... In>
  Tensor operator()(const OpDef& op, const Attrs& attrs, const In&... in) const {
    return call(op, attrs, in...);
  }
};
struct ToExisting {
  const Tensor& target;
  template <class... In>
  const Tensor& operator()(const OpDef& op, const Attrs& attrs, const In&... in) const {
    return call_into(op, attrs, target, in...);
  }
};

}  // namespace chorale::op

#define CHORALE_UNWRAP(...) __VA_ARGS__
// CHORALE_DEFINE_FORMS(f, (const Tensor& x, double p), to(kF, FAttrs{p}, x)) defines f, f_ (which overwrites x) and
// f_out.
#define CHORALE_DEFINE_FORMS(name, parameters, ...)                        \
  Tensor name(CHORALE_UNWRAP parameters) {                                 \
    constexpr ::chorale::op::ToNew to;                                     \
    return __VA_ARGS__;                                                    \
  }                                                                        \
  const Tensor& name##_(CHORALE_UNWRAP parameters) {                       \
    const ::chorale::op::ToExisting to{x};                                 \
    return __VA_ARGS__;                                                    \
  }                                                                        \
  const Tensor& name##_out(const Tensor& out, CHORALE_UNWRAP parameters) { \
    const ::chorale::op::ToExisting to{out};                               \
    return __VA_ARGS__;                                                    \
  }
