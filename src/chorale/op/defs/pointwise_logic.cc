// Comparisons, logic, bits, and choice by a condition.
#include <limits>

#include "chorale/op/defs/number_range.h"
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

std::vector<Sample> samples_compare() {
  std::vector<Sample> samples = samples_binary();
  samples.push_back({.in = {sample({2, 3}), sample({2, 3})}});  // equal everywhere
  return samples;
}
std::vector<Sample> samples_compare_number() {
  return {{.in = {sample({2, 3})}, .attrs = NumberAttrs{0.5}},
          {.in = {Tensor::from({1.0, 2.0, 3.0}, {3})}, .attrs = NumberAttrs{2}}};
}
std::vector<Sample> samples_zeros() {
  const Tensor x = Tensor::from({0.0, 1.5, 0.0, -2.0}, {4}), y = Tensor::from({0.0, 0.0, 3.0, -1.0}, {4});
  return {{.in = {x, y}}, {.in = {x, Tensor::from({2.0}, {})}}};
}
std::vector<Sample> samples_bits() {
  return {{.in = {sample_ints({2, 3}, 0, 100), sample_ints({3}, 0, 100, 1)}},
          {.in = {sample_bools({5}), sample_bools({5}, 1)}}};
}
std::vector<Sample> samples_where() {
  return {{.in = {sample_bools({2, 3}), sample({2, 3}), sample({2, 3}, 1)}},
          {.in = {sample_bools({3}), sample({2, 1}), sample({}, 1)}}};
}
std::vector<Sample> samples_masked() {
  return {{.in = {sample_bools({2, 3}), sample({2, 3})}, .attrs = NumberAttrs{2}},
          {.in = {sample_bools({3}), sample({2, 1}, 1)}, .attrs = NumberAttrs{-1}}};
}

// Rows that differ in nothing but name and expression.
constexpr OpDef comparison(ScalarOp op, const char* name) {
  return pointwise({op}, {.name = name, .grad = not_differentiable, .samples = samples_compare});
}
constexpr OpDef comparison_with_number(ScalarOp op, const char* name) {
  return pointwise(
      {op},
      {.name = name, .attrs = attrs_of<NumberAttrs>, .grad = not_differentiable, .samples = samples_compare_number});
}
constexpr OpDef logical(ScalarOp op, const char* name, Samples samples = samples_zeros) {
  return pointwise({op}, {.name = name, .grad = not_differentiable, .samples = samples});
}
constexpr OpDef classification(ScalarOp op, const char* name) {
  return pointwise({op, Promotion::kFloat}, {.name = name, .grad = not_differentiable, .samples = samples_unary});
}

constexpr OpDef kEq = comparison(ScalarOp::kEq, "eq");
constexpr OpDef kNe = comparison(ScalarOp::kNe, "ne");
constexpr OpDef kLt = comparison(ScalarOp::kLt, "lt");
constexpr OpDef kLe = comparison(ScalarOp::kLe, "le");
constexpr OpDef kGt = comparison(ScalarOp::kGt, "gt");
constexpr OpDef kGe = comparison(ScalarOp::kGe, "ge");
constexpr OpDef kEqScalar = comparison_with_number(ScalarOp::kEqScalar, "eq_scalar");
constexpr OpDef kNeScalar = comparison_with_number(ScalarOp::kNeScalar, "ne_scalar");
constexpr OpDef kLtScalar = comparison_with_number(ScalarOp::kLtScalar, "lt_scalar");
constexpr OpDef kLeScalar = comparison_with_number(ScalarOp::kLeScalar, "le_scalar");
constexpr OpDef kGtScalar = comparison_with_number(ScalarOp::kGtScalar, "gt_scalar");
constexpr OpDef kGeScalar = comparison_with_number(ScalarOp::kGeScalar, "ge_scalar");

constexpr OpDef kLogicalAnd = logical(ScalarOp::kLogicalAnd, "logical_and");
constexpr OpDef kLogicalOr = logical(ScalarOp::kLogicalOr, "logical_or");
constexpr OpDef kLogicalXor = logical(ScalarOp::kLogicalXor, "logical_xor");
constexpr OpDef kLogicalNot = logical(ScalarOp::kLogicalNot, "logical_not", samples_steps);
constexpr OpDef kBitwiseAnd = logical(ScalarOp::kBitwiseAnd, "bitwise_and", samples_bits);
constexpr OpDef kBitwiseOr = logical(ScalarOp::kBitwiseOr, "bitwise_or", samples_bits);
constexpr OpDef kBitwiseXor = logical(ScalarOp::kBitwiseXor, "bitwise_xor", samples_bits);
constexpr OpDef kBitwiseNot = logical(ScalarOp::kBitwiseNot, "bitwise_not", [] {
  return std::vector<Sample>{{.in = {sample_ints({2, 3}, 0, 100)}}, {.in = {sample_bools({4})}}};
});

constexpr OpDef kIsNan = classification(ScalarOp::kIsNan, "isnan");
constexpr OpDef kIsInf = classification(ScalarOp::kIsInf, "isinf");
constexpr OpDef kIsFinite = classification(ScalarOp::kIsFinite, "isfinite");

// ---- choice

constexpr OpDef kWhere =
    pointwise({ScalarOp::kWhere}, {
                                      .name = "where",
                                      .inputs = "condition, x, y",
                                      .grad = [](const GradArgs& g) -> Tensors {
                                        const Tensor &condition = g.in[0], &dz = g.dout[0];
                                        return {Tensor{}, g.needs(1) ? where(condition, dz, 0) : Tensor{},
                                                g.needs(2) ? where(condition, 0, dz) : Tensor{}};
                                      },
                                      .linear = linear_terms({{1}, {2}}),
                                      .monotone = rises_in({1, 2}),
                                      .saves = saves_in({0}),
                                      .samples = samples_where,
                                  });
constexpr OpDef kMaskedFill =
    pointwise({ScalarOp::kMaskedFill}, {
                                           .name = "masked_fill",
                                           .inputs = "mask, x",
                                           .attrs = attrs_of<NumberAttrs>,
                                           .grad = [](const GradArgs& g) -> Tensors {
                                             return {Tensor{}, where(g.in[0], 0, g.dout[0])};
                                           },
                                           // Partial sums of 0 are 0.
                                           .shard = {.labels = kElementwiseLabels,
                                                     .ways =
                                                         [](const ShardCall& call, ShardWays& ways) {
                                                           if (call.attrs.get<NumberAttrs>().value.is_zero())
                                                             ways.pass(linear_in({1}));
                                                         }},
                                           .monotone = rises_in({1}),
                                           .saves = saves_in({0}),
                                           .samples = samples_masked,
                                       });

}  // namespace

Rows logic_rows() {
  static constexpr const OpDef* rows[] = {
      &kEq,         &kNe,         &kLt,         &kLe,         &kGt,         &kGe,         &kEqScalar,
      &kNeScalar,   &kLtScalar,   &kLeScalar,   &kGtScalar,   &kGeScalar,   &kLogicalAnd, &kLogicalOr,
      &kLogicalXor, &kLogicalNot, &kBitwiseAnd, &kBitwiseOr,  &kBitwiseXor, &kBitwiseNot, &kIsNan,
      &kIsInf,      &kIsFinite,   &kWhere,      &kMaskedFill,
  };
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using namespace op;

namespace {
// A number beyond the range of an integral x is above or below all of its elements, and the loops have no such number:
// what is true of all of them is said by comparing with the smallest one.
template <class To>
decltype(auto) compare_to(const To& to, const OpDef& row, const Tensor& x, Scalar y) {
  if (!x.defined() || !is_integral(x.dtype()) || y.kind() > Scalar::Kind::kInt || can_hold(x.dtype(), y))
    return to(row, NumberAttrs{y}, x);
  const bool is_above = y.real() > 0;
  const bool holds = &row == &kNeScalar || ((&row == &kLtScalar || &row == &kLeScalar) && is_above) ||
                     ((&row == &kGtScalar || &row == &kGeScalar) && !is_above);
  return to(holds ? kGeScalar : kLtScalar, NumberAttrs{nearest_held(x.dtype(), std::numeric_limits<int64_t>::min())},
            x);
}
}  // namespace

CHORALE_DEFINE_FORMS(eq, (const Tensor& x, const Tensor& y), to(kEq, {}, x, y))
CHORALE_DEFINE_FORMS(ne, (const Tensor& x, const Tensor& y), to(kNe, {}, x, y))
CHORALE_DEFINE_FORMS(lt, (const Tensor& x, const Tensor& y), to(kLt, {}, x, y))
CHORALE_DEFINE_FORMS(le, (const Tensor& x, const Tensor& y), to(kLe, {}, x, y))
CHORALE_DEFINE_FORMS(gt, (const Tensor& x, const Tensor& y), to(kGt, {}, x, y))
CHORALE_DEFINE_FORMS(ge, (const Tensor& x, const Tensor& y), to(kGe, {}, x, y))
CHORALE_DEFINE_FORMS(eq, (const Tensor& x, Scalar y), compare_to(to, kEqScalar, x, y))
CHORALE_DEFINE_FORMS(ne, (const Tensor& x, Scalar y), compare_to(to, kNeScalar, x, y))
CHORALE_DEFINE_FORMS(lt, (const Tensor& x, Scalar y), compare_to(to, kLtScalar, x, y))
CHORALE_DEFINE_FORMS(le, (const Tensor& x, Scalar y), compare_to(to, kLeScalar, x, y))
CHORALE_DEFINE_FORMS(gt, (const Tensor& x, Scalar y), compare_to(to, kGtScalar, x, y))
CHORALE_DEFINE_FORMS(ge, (const Tensor& x, Scalar y), compare_to(to, kGeScalar, x, y))
CHORALE_DEFINE_FORMS(logical_and, (const Tensor& x, const Tensor& y), to(kLogicalAnd, {}, x, y))
CHORALE_DEFINE_FORMS(logical_or, (const Tensor& x, const Tensor& y), to(kLogicalOr, {}, x, y))
CHORALE_DEFINE_FORMS(logical_xor, (const Tensor& x, const Tensor& y), to(kLogicalXor, {}, x, y))
CHORALE_DEFINE_FORMS(logical_not, (const Tensor& x), to(kLogicalNot, {}, x))
CHORALE_DEFINE_FORMS(isnan, (const Tensor& x), to(kIsNan, {}, x))
CHORALE_DEFINE_FORMS(isinf, (const Tensor& x), to(kIsInf, {}, x))
CHORALE_DEFINE_FORMS(isfinite, (const Tensor& x), to(kIsFinite, {}, x))
CHORALE_DEFINE_FORMS(bitwise_and, (const Tensor& x, const Tensor& y), to(kBitwiseAnd, {}, x, y))
CHORALE_DEFINE_FORMS(bitwise_or, (const Tensor& x, const Tensor& y), to(kBitwiseOr, {}, x, y))
CHORALE_DEFINE_FORMS(bitwise_xor, (const Tensor& x, const Tensor& y), to(kBitwiseXor, {}, x, y))
CHORALE_DEFINE_FORMS(bitwise_not, (const Tensor& x), to(kBitwiseNot, {}, x))

Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y) {
  op::need_defined("where", "condition", condition);
  op::need_defined("where", "y", y);
  op::need_defined("where", "x", x);
  return call(kWhere, {}, condition, x, y);
}
Tensor where(const Tensor& condition, Scalar x, const Tensor& y) {
  op::need_defined("where", "condition", condition);
  op::need_defined("where", "y", y);
  if (y.defined()) check_held("where", promote(y.dtype(), x.kind()), x);
  return call(kMaskedFill, NumberAttrs{x}, condition, y);
}
Tensor where(const Tensor& condition, const Tensor& x, Scalar y) {
  op::need_defined("where", "condition", condition);
  op::need_defined("where", "x", x);
  return where(logical_not(condition), y, x);
}
const Tensor& where_out(const Tensor& out, const Tensor& condition, const Tensor& x, const Tensor& y) {
  return call_into(kWhere, {}, out, condition, x, y);
}

namespace {
// In place and into an existing tensor this is checked against that tensor. 0 and 1 are truth values where those are
// wanted.
Scalar fitting(const Tensor& x, Scalar value) {
  if (!x.defined()) return value;
  const bool is_truth_value = value.kind() == Scalar::Kind::kInt && (value.integer() == 0 || value.integer() == 1);
  if (x.dtype() == DType::kBool && is_truth_value) return value.integer() == 1;
  CHORALE_CHECK(promote(x.dtype(), value.kind()) == x.dtype(), "[masked_fill] the value ", value,
                " does not fit a tensor of ", x.dtype(), "; cast the tensor first, or call where()");
  check_held("masked_fill", x.dtype(), value);
  return value;
}
}  // namespace
CHORALE_DEFINE_FORMS(masked_fill, (const Tensor& x, const Tensor& mask, Scalar value),
                     to(kMaskedFill, NumberAttrs{fitting(x, value)}, mask, x))

}  // namespace chorale
