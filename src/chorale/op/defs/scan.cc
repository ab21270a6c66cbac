// Running sums and products, and products over dimensions, whose gradient is made of running ones.
#include <array>

#include "chorale/kernel/cpu/reduce/reduce.h"
#include "chorale/kernel/cpu/reduce/scan.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/reduce_common.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

extern const OpDef kCumprod, kRecurrence;

ScanAttrs reversed(ScanAttrs attrs) {
  attrs.reverse = !attrs.reverse;
  return attrs;
}

// The products of all elements before each.
Tensor products_before(const Tensor& x, int64_t dim, bool reverse) {
  return call(kCumprod, ScanAttrs{dim, reverse, true}, x);
}

void infer_scan(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  normalize_dim(args.op.name, args.attrs.get<ScanAttrs>().dim, x.dims());
  out[0] = {{.sizes = x.sizes(), .dtype = sum_dtype(x.dtype()), .device = x.device()}};
}

void ways_scan(const ShardCall& call, ShardWays& ways) {
  const std::string each = keep_whole(letters(call.dims(0)), call.attrs.get<ScanAttrs>().dim);
  ways.split(join(std::vector<std::string>(call.in.size(), each), {each}));
}

std::vector<Sample> samples_scan() {
  return {{{sample({2, 3, 4})}, ScanAttrs{1, false, false}},
          {{sample({2, 5}, 1)}, ScanAttrs{-1, true, false}},
          {{sample({4, 2}, 2)}, ScanAttrs{0, false, true}},
          {{sample({3}, 3)}, ScanAttrs{0, true, true}},
          {{sample({}, 4)}, ScanAttrs{0, false, false}}};
}

constexpr OpDef kCumsum{
    .name = "cumsum",
    .inputs = "x",
    .attrs = attrs_of<ScanAttrs>,
    .dtypes = kAll,
    .infer = infer_scan,
    .cpu = kernel::cpu::cumsum,
    .grad = [](const GradArgs& g) -> Tensors { return {call(kCumsum, reversed(g.attrs.get<ScanAttrs>()), g.dout[0])}; },
    .shard = {.ways = ways_scan},
    .linear = linear_in({0}),
    .saves = kSavesNothing,
    .autocast = Cast::kF32,
    .samples = samples_scan,
    .formula = "sums of x up to each element along dim",
};

// Element i occurs in y[k] for every k >= i, with the factor (x[0] … x[i-1]) (x[i+1] … x[k]). The first part is a
// running product; the sum over k of dy[k] times the second part runs from the back: s[i] = dy[i] + x[i+1] s[i+1].
// Nothing is divided by x[i], which may be 0.
Tensors cumprod_grad(const GradArgs& g) {
  const auto& attrs = g.attrs.get<ScanAttrs>();
  const Tensor x = conj(g.in[0]), dy = g.dout[0];
  const ScanAttrs back{attrs.dim, !attrs.reverse, true};
  const Tensor later = attrs.exclusive ? call(kRecurrence, back, x, dy) : dy + call(kRecurrence, back, x, x * dy);
  return {products_before(x, attrs.dim, attrs.reverse) * later};
}

constexpr OpDef kCumprod{
    .name = "cumprod",
    .inputs = "x",
    .attrs = attrs_of<ScanAttrs>,
    .dtypes = kAll,
    .infer = infer_scan,
    .cpu = kernel::cpu::cumprod,
    .grad = cumprod_grad,
    .shard = {.ways = ways_scan},
    .saves = kSavesInputs,
    .autocast = Cast::kF32,
    .samples = samples_scan,
    .formula = "products of x up to each element along dim",
};

// y[i] = b[i-1] + a[i-1] y[i-1]: the gradient that reaches y[i] comes from y[i+1] alone, so it is the same recurrence
// from the back.
constexpr OpDef kRecurrence{
    .name = "recurrence",
    .inputs = "a, b",
    .attrs = attrs_of<ScanAttrs>,
    .dtypes = kFloats | kComplexes,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          infer_scan(args, out);
          const Tensor &a = args.in[0], &b = args.in[1];
          CHORALE_CHECK(a.sizes() == b.sizes() && a.dtype() == b.dtype(),
                        "[recurrence] factors and terms differ: ", a.dtype(), " ", a.sizes(), " and ", b.dtype(), " ",
                        b.sizes());
          CHORALE_CHECK(args.attrs.get<ScanAttrs>().exclusive, "[recurrence] exists in its exclusive form only");
        },
    .cpu = kernel::cpu::recurrence,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor db = call(kRecurrence, reversed(g.attrs.get<ScanAttrs>()), conj(g.in[0]), g.dout[0]);
      return {g.needs(0) ? db * conj(g.out[0]) : Tensor{}, db};
    },
    .shard = {.ways = ways_scan},
    .linear = linear_in({1}),
    .saves = {.in = {0}, .out = {0}},
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 4}), sample({2, 4}, 1)}, ScanAttrs{1, false, true}},
              {{sample({3, 2}, 2), sample({3, 2}, 3)}, ScanAttrs{0, true, true}}};
    },
    .formula = "y[i] = b[i-1] + a[i-1] y[i-1], from 0",
};

// The product of all elements but one: those before it times those behind it.
Tensors prod_grad(const GradArgs& g) {
  const Tensor x = g.in[0];
  const DimMask reduced = reduced_dims<ReduceAttrs>(g);
  IntList order;  // kept dimensions first, so that the reduced ones can become one
  for (DimMask wanted : {0u, 1u}) {
    for (int64_t d = 0; d < x.dims(); ++d) {
      if ((reduced >> d & 1u) == wanted) order.values[order.count++] = d;
    }
  }
  IntList inverse = order;
  for (size_t i = 0; i < order.size(); ++i) inverse.values[order[i]] = static_cast<int64_t>(i);
  const Tensor front = permute(x, order);
  IntList flat = reduced_shape(x.sizes(), reduced, false);
  flat.values[flat.count++] = reduced_count(x.sizes(), reduced);
  const Tensor row = reshape(front, flat);
  const Tensor others = products_before(row, -1, false) * products_before(row, -1, true);
  return {spread(g.dout[0], x.sizes(), reduced) * conj(permute(reshape(others, front.sizes()), inverse))};
}

constexpr OpDef kProd{
    .name = "prod",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kAll,
    .infer = [](const InferArgs& a,
                std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, sum_dtype(a.in[0].dtype()), out[0]); },
    .cpu = kernel::cpu::prod,
    .grad = prod_grad,
    .shard = kReducesParts<Reduce::kProduct>,
    .saves = kSavesInputs,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 3})}, ReduceAttrs{}},
              {{sample({2, 3, 4}, 1)}, ReduceAttrs{{1}, true}},
              {{sample({3, 2, 2}, 2)}, ReduceAttrs{{0, -1}, false}},
              {{sample({}, 3)}, ReduceAttrs{}}};
    },
    .formula = "product of x over dims",
};

Tensor scan_as(const OpDef& row, const Tensor& x, int64_t dim, std::optional<DType> dtype) {
  const Tensor y = call(row, ScanAttrs{dim, false, false}, elements_for(row.name, x, dtype));
  return dtype ? to(y, *dtype) : y;
}

}  // namespace

Rows scan_rows() {
  static constexpr std::array rows{&kCumsum, &kCumprod, &kRecurrence, &kProd};
  return rows;
}

}  // namespace op

Tensor cumsum(const Tensor& x, int64_t dim, std::optional<DType> dtype) {
  return op::scan_as(op::kCumsum, x, dim, dtype);
}
Tensor cumprod(const Tensor& x, int64_t dim, std::optional<DType> dtype) {
  return op::scan_as(op::kCumprod, x, dim, dtype);
}
Tensor prod(const Tensor& x, const IntList& dims, bool keepdim, std::optional<DType> dtype) {
  const Tensor y = op::call(op::kProd, op::ReduceAttrs{dims, keepdim}, op::elements_for("prod", x, dtype));
  return dtype ? to(y, *dtype) : y;
}

}  // namespace chorale
