// Rows and functions of embeddings.
#include "chorale/op/embedding.h"

#include "chorale/kernel/cpu/index/embedding.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/index_samples.h"
#include "chorale/op/index.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

void check_table(const char* op, const Tensor& table, const Tensor& indices) {
  CHORALE_CHECK(table.dims() == 2, "[", op, "] the table must be a matrix, found shape ", table.sizes());
  CHORALE_CHECK(indices.dtype() == DType::kI64 || indices.dtype() == DType::kI32, "[", op,
                "] indices are i64 or i32, not ", indices.dtype());
}

void infer_embedding(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &table = args.in[0], &indices = args.in[1];
  check_table("embedding", table, indices);
  CHORALE_CHECK(indices.dims() < static_cast<int64_t>(kMaxDims), "[embedding] indices of shape ", indices.sizes(),
                " leave no room for another dimension");
  out[0].sizes = indices.sizes();
  out[0].sizes.push_back(table.size(1));
  out[0].dtype = table.dtype();
  out[0].device = table.device();
}

void infer_embedding_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &indices = args.in[1];
  Shape expected = indices.sizes();
  CHORALE_CHECK(dy.dims() == indices.dims() + 1, "[embedding_backward] a gradient of shape ", dy.sizes(),
                " does not belong to indices of shape ", indices.sizes());
  expected.push_back(dy.sizes().back());
  CHORALE_CHECK(dy.sizes() == expected, "[embedding_backward] a gradient of shape ", expected, " was expected, found ",
                dy.sizes());
  out[0].sizes = {args.attrs.get<EmbeddingBackwardAttrs>().rows, dy.sizes().back()};
  out[0].dtype = dy.dtype();
  out[0].device = dy.device();
}

// A gradient entry per index, without those of the padding row.
Tensor sparse_gradient(const Tensor& dy, const Tensor& indices, const Shape& table, int64_t padding) {
  Tensor rows = reshape(to(indices, DType::kI64), {indices.elems()});
  Tensor values = reshape(dy, {indices.elems(), table[1]});
  if (padding != kNoPadding) {
    const Tensor kept = select(nonzero(ne(rows, padding)), 1, 0);
    rows = index_select(rows, 0, kept);
    values = index_select(values, 0, kept);
  }
  return Tensor::sparse_coo(unsqueeze(rows, 0), values, table);
}

int64_t bags_of(const Tensor& offsets, bool last_offset) { return offsets.elems() - (last_offset ? 1 : 0); }

void check_bags(const Tensor& indices, const Tensor& offsets, const Tensor& weights, BagMode mode, bool last_offset) {
  CHORALE_CHECK(indices.dims() == 1 && offsets.dims() == 1,
                "[embedding_bag] indices and offsets are vectors, found shapes ", indices.sizes(), " and ",
                offsets.sizes());
  CHORALE_CHECK(offsets.dtype() == DType::kI64 || offsets.dtype() == DType::kI32,
                "[embedding_bag] offsets are i64 or i32, not ", offsets.dtype());
  CHORALE_CHECK(!last_offset || offsets.elems() > 0,
                "[embedding_bag] the last offset was announced, but there is none");
  if (!weights.defined()) return;
  CHORALE_CHECK(mode == BagMode::kSum, "[embedding_bag] only a sum can be weighted");
  CHORALE_CHECK(weights.sizes() == indices.sizes(), "[embedding_bag] weights of shape ", weights.sizes(),
                " do not fit indices of shape ", indices.sizes());
}

void infer_embedding_bag(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  const Tensor &table = args.in[0], &indices = args.in[1], &offsets = args.in[2], &weights = args.in[3];
  check_table("embedding_bag", table, indices);
  check_bags(indices, offsets, weights, a.mode, a.last_offset);
  CHORALE_CHECK(!weights.defined() || weights.dtype() == table.dtype(), "[embedding_bag] weights are ", weights.dtype(),
                ", but the table is ", table.dtype());
  out[0].sizes = {bags_of(offsets, a.last_offset), table.size(1)};
  out[0].dtype = table.dtype();
  out[1].sizes = a.mode == BagMode::kMax ? out[0].sizes : Shape{0};
  out[1].dtype = DType::kI64;
  out[0].device = out[1].device = table.device();
}

void infer_embedding_bag_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<EmbeddingBagBackwardAttrs>();
  const Tensor& dy = args.in[0];
  check_bags(args.in[1], args.in[2], args.in[3], a.mode, a.last_offset);
  CHORALE_CHECK(dy.dims() == 2 && dy.size(0) == bags_of(args.in[2], a.last_offset),
                "[embedding_bag_backward] a gradient of shape ", dy.sizes(), " does not belong to ",
                bags_of(args.in[2], a.last_offset), " bags");
  CHORALE_CHECK(a.mode != BagMode::kMax || (args.in[4].defined() && args.in[4].sizes() == dy.sizes()),
                "[embedding_bag_backward] of a maximum needs the rows that were picked");
  out[0].sizes = {a.rows, dy.size(1)};
  out[0].dtype = dy.dtype();
  out[0].device = dy.device();
}

void infer_embedding_bag_weights_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &table = args.in[1], &indices = args.in[2], &offsets = args.in[3];
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  check_table("embedding_bag_weights_backward", table, indices);
  check_bags(indices, offsets, {}, a.mode, a.last_offset);
  const Shape expected{bags_of(offsets, a.last_offset), table.size(1)};
  CHORALE_CHECK(dy.sizes() == expected, "[embedding_bag_weights_backward] a gradient of shape ", expected,
                " was expected, found ", dy.sizes());
  out[0].sizes = indices.sizes();
  out[0].dtype = dy.dtype();
  out[0].device = dy.device();
}

Attrs local_embedding(const ShardCall& call, std::span<const Part> in, std::span<const Part>) {
  auto a = call.attrs.get<EmbeddingAttrs>();
  const int64_t rows = call.in[0].size(0);
  if (in[0].sizes[0] == rows) return a;
  a.first = in[0].first[0];
  a.total = rows;
  return a;
}
Attrs local_embedding_backward(const ShardCall& call, std::span<const Part>, std::span<const Part> out) {
  auto a = call.attrs.get<EmbeddingBackwardAttrs>();
  const int64_t rows = call.out[0][0];
  if (out[0].sizes[0] == rows) return a;
  a.rows = out[0].sizes[0];
  a.first = out[0].first[0];
  a.total = rows;
  return a;
}

// Columns may be split. Without maxima there are no picked rows: an empty list.
void ways_embedding_bag(const ShardCall& call, ShardWays& ways) {
  const bool max = call.attrs.get<EmbeddingBagAttrs>().mode == BagMode::kMax;
  const Placement columns = Placement::shard(1), whole;
  ways.add({columns, whole, whole, whole}, {columns, max ? columns : whole});
}

}  // namespace

constinit const OpDef kEmbedding{
    .name = "embedding",
    .inputs = "table, indices",
    .attrs = attrs_of<EmbeddingAttrs>,
    .dtypes = kAll,
    .infer = infer_embedding,
    .cpu = kernel::cpu::embedding,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<EmbeddingAttrs>();
      const Shape table = g.shape(0);
      if (a.sparse) return {sparse_gradient(g.dout[0], g.in[1], table, a.padding), {}};
      return {emit(g, 0, kEmbeddingBackward, EmbeddingBackwardAttrs{table[0], a.padding}, g.dout[0], g.in[1]), {}};
    },
    // A part of the rows gives those that it has, and zeros: partial sums.
    .shard = {.labels = "vc,...->...c", .partial = Reduce::kSum, .local = local_embedding},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4, 3}), sample_indices({2, 0, 2, 3}, {2, 2})}, EmbeddingAttrs{}},
              {{sample({4, 1}), sample_indices({1}, {})}, EmbeddingAttrs{}},
              // The padding row has no gradient although the result depends on it, and a sparse one is no dense one.
              {{sample({4, 2}), sample_indices({1, 3, 1}, {3})}, EmbeddingAttrs{1, false}, false},
              {{sample({4, 2}), sample_indices({1, 3, 1}, {3})}, EmbeddingAttrs{kNoPadding, true}, false}};
    },
    .formula = "rows of a table",
};

constinit const OpDef kEmbeddingBackward{
    .name = "embedding_backward",
    .inputs = "dy, indices",
    .attrs = attrs_of<EmbeddingBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_embedding_backward,
    .cpu = kernel::cpu::embedding_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const int64_t padding = g.attrs.get<EmbeddingBackwardAttrs>().padding;
      const Tensor ddy = call(kEmbedding, EmbeddingAttrs{}, g.dout[0], g.in[1]);
      return {padding == kNoPadding ? ddy : masked_fill(ddy, unsqueeze(eq(g.in[1], padding), -1), Scalar(0)), {}};
    },
    .shard = {.labels = "...c,...->vc", .partial = Reduce::kSum, .local = local_embedding_backward},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 3}), sample_indices({2, 0, 2, 3}, {2, 2})}, EmbeddingBackwardAttrs{4, kNoPadding}},
              {{sample({3, 2}), sample_indices({1, 3, 1}, {3})}, EmbeddingBackwardAttrs{5, 1}}};
    },
    .formula = "zeros [rows, columns] with dy added at indices, except those of the padding",
};

constinit const OpDef kEmbeddingBag{
    .name = "embedding_bag",
    .inputs = "table, indices, offsets, weights?",
    .outputs = 2,  // the second: the row that each maximum came from, empty for sums
    .attrs = attrs_of<EmbeddingBagAttrs>,
    .dtypes = kFloats,
    .infer = infer_embedding_bag,
    .cpu = kernel::cpu::embedding_bag,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<EmbeddingBagAttrs>();
      Tensors din(4);
      if (g.needs(0)) {
        const Tensor picked = a.mode == BagMode::kMax ? g.out[1] : Tensor{};
        din[0] =
            call(kEmbeddingBagBackward, EmbeddingBagBackwardAttrs{g.in[0].size(0), a.mode, a.padding, a.last_offset},
                 g.dout[0], g.in[1], g.in[2], g.in[3], picked);
      }
      if (g.needs(3)) din[3] = call(kEmbeddingBagWeightsBackward, a, g.dout[0], g.in[0], g.in[1], g.in[2]);
      return din;
    },
    .twice = false,
    .shard = {.ways = ways_embedding_bag},
    .saves = {.in = InputSet::all(), .out = {1}},
    .samples = []() -> std::vector<Sample> {
      const Tensor list = sample_indices({2, 0, 2, 3, 1}, {5}), starts = sample_indices({0, 2, 2}, {3});
      return {{{sample({4, 3}), list, starts, {}}, EmbeddingBagAttrs{BagMode::kSum, kNoPadding, false}},
              {{sample({4, 3}), list, starts, sample({5}, 1)}, EmbeddingBagAttrs{BagMode::kSum, kNoPadding, false}},
              {{sample({4, 3}), list, starts, {}}, EmbeddingBagAttrs{BagMode::kMean, 2, false}},
              {{sample({4, 3}), list, sample_indices({0, 3, 5}, {3}), {}},
               EmbeddingBagAttrs{BagMode::kMax, kNoPadding, true}}};
    },
    .formula = "sums, means or maxima of rows of a table, bag by bag",
};

constinit const OpDef kEmbeddingBagBackward{
    .name = "embedding_bag_backward",
    .inputs = "dy, indices, offsets, weights?, picked?",
    .attrs = attrs_of<EmbeddingBagBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_embedding_bag_backward,
    .cpu = kernel::cpu::embedding_bag_backward,
    .grad = not_differentiable,
    .shard = {.labels = "Bc,N,B,N,Bc->Vc"},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      const Tensor list = sample_indices({2, 0, 2, 3, 1}, {5}), starts = sample_indices({0, 2, 2}, {3});
      return {{{sample({3, 2}), list, starts, sample({5}, 1), {}},
               EmbeddingBagBackwardAttrs{4, BagMode::kSum, kNoPadding, false}},
              {{sample({3, 2}), list, starts, {}, {}}, EmbeddingBagBackwardAttrs{4, BagMode::kMean, 3, false}},
              {{sample({1, 2}), list, sample_indices({0}, {1}), {}, sample_indices({3, 0}, {1, 2})},
               EmbeddingBagBackwardAttrs{4, BagMode::kMax, kNoPadding, false}}};
    },
    .formula = "the gradient of the table",
};

constinit const OpDef kEmbeddingBagWeightsBackward{
    .name = "embedding_bag_weights_backward",
    .inputs = "dy, table, indices, offsets",
    .attrs = attrs_of<EmbeddingBagAttrs>,
    .dtypes = kFloats,
    .infer = infer_embedding_bag_weights_backward,
    .cpu = kernel::cpu::embedding_bag_weights_backward,
    .grad = not_differentiable,
    .shard = {.labels = "Bc,Vc,N,O->N", .partial = Reduce::kSum},
    .linear = linear_in({0, 1}),
    .samples = []() -> std::vector<Sample> {
      return {
          {{sample({3, 2}), sample({4, 2}, 1), sample_indices({2, 0, 2, 3, 1}, {5}), sample_indices({0, 2, 2}, {3})},
           EmbeddingBagAttrs{BagMode::kSum, 2, false}}};
    },
    .formula = "the gradient of the weights: dy of the bag times the row",
};

Rows embedding_rows() {
  static constexpr const OpDef* kRows[] = {&kEmbedding, &kEmbeddingBackward, &kEmbeddingBag, &kEmbeddingBagBackward,
                                           &kEmbeddingBagWeightsBackward};
  return kRows;
}

}  // namespace op

namespace {
// Counted from the end when negative.
int64_t padding_row(const char* name, const Tensor& table, std::optional<int64_t> padding) {
  if (!padding) return kNoPadding;
  CHORALE_CHECK(table.dims() == 2, "[", name, "] the table must be a matrix, found shape ", table.sizes());
  const int64_t rows = table.size(0);
  CHORALE_CHECK(*padding >= -rows && *padding < rows, "[", name, "] the padding row ", *padding,
                " is out of range: the table has ", rows, " rows");
  return *padding < 0 ? *padding + rows : *padding;
}
}  // namespace

Tensor embedding(const Tensor& indices, const Tensor& table, std::optional<int64_t> padding, bool sparse) {
  return op::call(op::kEmbedding, op::EmbeddingAttrs{padding_row("embedding", table, padding), sparse}, table, indices);
}

Tensor embedding_bag(const Tensor& indices, const Tensor& table, const Tensor& offsets,
                     const EmbeddingBagOptions& options) {
  op::need_defined("embedding_bag", "indices", indices);
  const op::EmbeddingBagAttrs attrs{options.mode, padding_row("embedding_bag", table, options.padding),
                                    options.include_last_offset};
  return op::call_many<2>(op::kEmbeddingBag, attrs, table, indices, offsets, options.weights)[0];
}

Tensor embedding_bag(const Tensor& indices, const Tensor& table, const EmbeddingBagOptions& options) {
  op::need_defined("embedding_bag", "indices", indices);
  CHORALE_CHECK(indices.dims() == 2,
                "[embedding_bag] without offsets the indices are a matrix with a bag per row, found shape ",
                indices.sizes());
  const int64_t bags = indices.size(0), length = indices.size(1);
  EmbeddingBagOptions flat = options;
  flat.include_last_offset = true;
  if (options.weights.defined()) flat.weights = reshape(options.weights, {bags * length});
  const Tensor offsets = mul(arange(bags + 1, DType::kI64, indices.device()), length);
  return embedding_bag(reshape(indices, {bags * length}), table, offsets, flat);
}

}  // namespace chorale
