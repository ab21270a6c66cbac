// Factorisations and triangular systems. Gradients solve systems with the factors; nothing is inverted.
#include "chorale/op/linalg.h"

#include <array>

#include "chorale/kernel/cpu/product/linalg.h"
#include "chorale/op/builder.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {

using kernel::CholeskyAttrs;
using kernel::TriangularAttrs;

namespace {

Shape batch_sizes(const Tensor& x) { return Shape({x.sizes().data(), x.sizes().size() - 2}); }

void check_matrices(const char* op, const Tensor& x, bool square) {
  CHORALE_CHECK(x.dims() >= 2 && (!square || x.size(-1) == x.size(-2)), "[", op, "] needs ", square ? "square " : "",
                "matrices in the last two dimensions, found shape ", x.sizes());
}

// A lower triangle with half its diagonal.
Tensor half_tril(const Tensor& x) { return (tril(x) + tril(x, -1)) / 2; }

constexpr DTypeSet kSolvable{DType::kF32, DType::kF64};

// a = l l^T changes by dl l^T + l dl^T; solved for dl, and turned around: l^-T phi(l^T dl) l^-1, symmetrised, where phi
// takes the lower triangle with half its diagonal.
Tensors cholesky_grad(const GradArgs& g) {
  const bool upper = g.attrs.get<CholeskyAttrs>().upper;
  const Tensor l = upper ? transpose(g.out[0], -2, -1) : g.out[0];
  const Tensor dl = upper ? transpose(g.dout[0], -2, -1) : g.dout[0];
  const Tensor lt = transpose(l, -2, -1);
  const Tensor phi = half_tril(matmul(lt, dl));
  const Tensor symmetric = (phi + transpose(phi, -2, -1)) / 2;
  return {solve_triangular(l, solve_triangular(lt, symmetric, true), false, false)};
}

// Positive definite: x x^T with a heavy diagonal.
Tensor sample_definite(const Shape& sizes, int seed) {
  const Tensor x = sample(sizes, seed, -1, 1);
  const int64_t n = sizes.back();
  Tensor a = Tensor::empty(sizes, DType::kF64);
  const auto from = x.span<double>();
  const auto to = a.span<double>();
  const auto at = [n](int64_t matrix, int64_t i, int64_t j) { return static_cast<size_t>((matrix * n + i) * n + j); };
  for (int64_t matrix = 0; matrix < a.elems() / (n * n); ++matrix) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = i == j ? 1 : 0;
        for (int64_t k = 0; k < n; ++k) sum += from[at(matrix, i, k)] * from[at(matrix, j, k)];
        to[at(matrix, i, j)] = sum;
      }
    }
  }
  return a;
}

constexpr OpDef kCholesky{
    .name = "cholesky",
    .inputs = "a",
    .attrs = attrs_of<CholeskyAttrs>,
    .dtypes = kSolvable,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          const Tensor& a = args.in[0];
          check_matrices("cholesky", a, true);
          out[0] = {spec_of(a)};
        },
    .cpu = kernel::cpu::cholesky,
    .grad = cholesky_grad,
    .shard = {.labels = "...MN->...MN"},
    .saves = kSavesOutputs,
    .autocast = Cast::kF32,
    // The gradient is that for symmetric changes of a, which differences in one element are not: linalg_test.cc has it.
    .samples = []() -> std::vector<Sample> {
      return {{.in = {sample_definite({3, 3}, 0)}, .attrs = CholeskyAttrs{false}, .grad = false},
              {.in = {sample_definite({2, 4, 4}, 1)}, .attrs = CholeskyAttrs{true}, .grad = false}};
    },
    .formula = "l with a = l l^T",
};

void infer_solve(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &a = args.in[0], &b = args.in[1];
  check_matrices("solve_triangular", a, true);
  check_matrices("solve_triangular", b, false);
  CHORALE_CHECK(a.dtype() == b.dtype(), "[solve_triangular] a is ", a.dtype(), " and b is ", b.dtype());
  CHORALE_CHECK(a.size(-1) == b.size(-2) && batch_sizes(a) == batch_sizes(b), "[solve_triangular] a of shape ",
                a.sizes(), " does not fit b of shape ", b.sizes());
  out[0] = {spec_of(b)};
}

// x = a^-1 b: db = a^-T dx, da = -db x^T where a is read.
Tensors solve_grad(const GradArgs& g) {
  const auto& attrs = g.attrs.get<TriangularAttrs>();
  const Tensor db = solve_triangular(transpose(g.in[0], -2, -1), g.dout[0], !attrs.upper, true, attrs.unit);
  if (!g.needs(0)) return {Tensor{}, db};
  const Tensor da = -matmul(db, transpose(g.out[0], -2, -1));
  return {attrs.upper ? triu(da, attrs.unit ? 1 : 0) : tril(da, attrs.unit ? -1 : 0), db};
}

// A triangle that is far from singular; the other one holds numbers that must not be read.
Tensor sample_triangle(const Shape& sizes, int seed) {
  const Tensor a = sample(sizes, seed, -1, 1);
  const int64_t n = sizes.back();
  for (int64_t i = 0; i < a.elems(); ++i) {
    if (i % (n * n) % (n + 1) == 0) a.data<double>()[i] += 3;
  }
  return a;
}

constexpr OpDef kSolveTriangular{
    .name = "solve_triangular",
    .inputs = "a, b",
    .attrs = attrs_of<TriangularAttrs>,
    .dtypes = kSolvable,
    .infer = infer_solve,
    .cpu = kernel::cpu::solve_triangular,
    .grad = solve_grad,
    .shard = {.labels = "...MK,...Kn->...Kn"},
    .linear = linear_in({1}),
    .saves = {.in = {0}, .out = {0}},
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample_triangle({3, 3}, 0), sample({3, 2}, 1)}, TriangularAttrs{false, false}},
              {{sample_triangle({2, 3, 3}, 2), sample({2, 3, 1}, 3)}, TriangularAttrs{true, false}},
              {{sample_triangle({4, 4}, 4), sample({4, 3}, 5)}, TriangularAttrs{true, true}}};
    },
    .formula = "x with a x = b",
};

void infer_qr(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& a = args.in[0];
  check_matrices("qr", a, false);
  const int64_t k = std::min(a.size(-1), a.size(-2));
  out[0] = {spec_of(a)};
  out[1] = out[0];
  out[0].sizes.back() = k;
  out[1].sizes[a.sizes().size() - 2] = k;
}

// da r^T = dq + q sym(triu(dr r^T - q^T dq)), where sym adds the transpose and counts the diagonal once.
Tensors qr_grad(const GradArgs& g) {
  const Tensor q = g.out[0], r = g.out[1];
  CHORALE_CHECK(q.size(-2) >= r.size(-1), "[qr] is differentiable for m >= n only; a has shape ", g.shape(0));
  const Tensor rt = transpose(r, -2, -1);
  Tensor inner;
  if (g.dout[1].defined()) inner = matmul(g.dout[1], rt);
  if (g.dout[0].defined()) {
    const Tensor moved = matmul(transpose(q, -2, -1), g.dout[0]);
    inner = inner.defined() ? inner - moved : -moved;
  }
  inner = triu(inner) + transpose(triu(inner, 1), -2, -1);
  Tensor right = matmul(q, inner);
  if (g.dout[0].defined()) right = right + g.dout[0];
  return {solve_triangular(rt, right, false, false)};
}

constexpr OpDef kQr{
    .name = "qr",
    .inputs = "a",
    .outputs = 2,
    .dtypes = kSolvable,
    .infer = infer_qr,
    .cpu = kernel::cpu::qr,
    .grad = qr_grad,
    .shard = {.labels = "...MN->...MK,...KN"},
    .saves = kSavesOutputs,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4, 3}, 0)}}, {{sample({2, 3, 3}, 1)}}, {.in = {sample({2, 4}, 2)}, .grad = false}};
    },
    .formula = "q, r with a = q r",
};

// a and b with the batch dimensions of both.
std::pair<Tensor, Tensor> with_equal_batches(const Tensor& a, const Tensor& b) {
  check_matrices("solve_triangular", a, false);
  check_matrices("solve_triangular", b, false);
  const Shape batch = broadcast_shapes("solve_triangular", batch_sizes(a), batch_sizes(b));
  const auto widened = [&](const Tensor& x) {
    Shape sizes = batch;
    sizes.push_back(x.size(-2));
    sizes.push_back(x.size(-1));
    return x.sizes() == sizes ? x : expand(x, sizes);
  };
  return {widened(a), widened(b)};
}

}  // namespace

Rows linalg_rows() {
  static constexpr std::array rows{&kCholesky, &kSolveTriangular, &kQr};
  return rows;
}

}  // namespace op

Tensor cholesky(const Tensor& a, bool upper) { return op::call(op::kCholesky, op::CholeskyAttrs{upper}, a); }

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular) {
  op::need_defined("solve_triangular", "a", a);
  op::need_defined("solve_triangular", "b", b);
  const auto [matrix, right] = op::with_equal_batches(a, b);
  if (left) return op::call(op::kSolveTriangular, op::TriangularAttrs{upper, unitriangular}, matrix, right);
  // x a = b is a^T x^T = b^T.
  return transpose(op::call(op::kSolveTriangular, op::TriangularAttrs{!upper, unitriangular}, transpose(matrix, -2, -1),
                            transpose(right, -2, -1)),
                   -2, -1);
}

Qr qr(const Tensor& a) {
  auto [q, r] = op::call_many<2>(op::kQr, {}, a);
  return {std::move(q), std::move(r)};
}

}  // namespace chorale
