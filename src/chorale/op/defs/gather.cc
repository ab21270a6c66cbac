// Rows of ops with an index per element.
#include <string>

#include "chorale/kernel/cpu/index/index.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/index_samples.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/index.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

// The index has as many dimensions as x (of `sizes`) and, except along the dimension, no more elements than it. A
// scalar counts as a vector of one element.
void check_gather_index(const char* op, const Shape& sizes, int64_t dim, const Tensor& index) {
  CHORALE_CHECK(index.dtype() == DType::kI64, "[", op, "] indices are i64, not ", index.dtype());
  const auto at = static_cast<size_t>(normalize_dim(op, dim, static_cast<int64_t>(sizes.size())));
  if (index.elems() == 0) return;  // as PyTorch: nothing is indexed
  CHORALE_CHECK(std::max<size_t>(sizes.size(), 1) == std::max<size_t>(index.sizes().size(), 1), "[", op,
                "] an index of shape ", index.sizes(), " and a tensor of shape ", sizes,
                " must have the same number of dimensions");
  for (size_t d = 0; d < std::min(sizes.size(), index.sizes().size()); ++d) {
    CHORALE_CHECK(d == at || index.sizes()[d] <= sizes[d], "[", op, "] an index of shape ", index.sizes(),
                  " is larger than the tensor of shape ", sizes, " in dimension ", d);
  }
}

void check_source(const char* op, const Tensor& x, const Tensor& index, const Tensor& source) {
  CHORALE_CHECK(source.dtype() == x.dtype(), "[", op, "] the source is ", source.dtype(), ", but x is ", x.dtype(),
                "; cast one of them");
  if (index.elems() == 0) return;
  bool fits = std::max<size_t>(source.sizes().size(), 1) == std::max<size_t>(index.sizes().size(), 1);
  for (size_t d = 0; fits && d < std::min(index.sizes().size(), source.sizes().size()); ++d) {
    fits = index.sizes()[d] <= source.sizes()[d];
  }
  CHORALE_CHECK(fits, "[", op, "] an index of shape ", index.sizes(), " needs a source at least as large, found ",
                source.sizes());
}

void same_as(const Tensor& x, OutSpec& out) {
  out.sizes = x.sizes();
  out.dtype = x.dtype();
  out.device = x.device();
}

void infer_gather(const InferArgs& args, std::span<OutSpec> out) {
  check_gather_index("gather", args.in[0].sizes(), args.attrs.get<DimAttrs>().dim, args.in[1]);
  same_as(args.in[0], out[0]);
  out[0].sizes = args.in[1].sizes();
}

void infer_gather_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<DimBackwardAttrs>();
  check_gather_index("gather_backward", a.sizes.shape(), a.dim, args.in[1]);
  CHORALE_CHECK(args.in[0].sizes() == args.in[1].sizes(), "[gather_backward] a gradient of shape ", args.in[1].sizes(),
                " was expected, found ", args.in[0].sizes());
  same_as(args.in[0], out[0]);
  out[0].sizes = a.sizes.shape();
}

void infer_scatter(const InferArgs& args, std::span<OutSpec> out) {
  check_gather_index(args.op.name, args.in[0].sizes(), args.attrs.get<DimAttrs>().dim, args.in[1]);
  check_source(args.op.name, args.in[0], args.in[1], args.in[2]);
  same_as(args.in[0], out[0]);
}

void infer_scatter_fill(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<FillAttrs>();
  check_gather_index("scatter", args.in[0].sizes(), a.dim, args.in[1]);
  CHORALE_CHECK(is_complex(args.in[0].dtype()) || a.value.kind() != Scalar::Kind::kComplex,
                "[scatter] a complex value cannot be written into ", args.in[0].dtype());
  check_held("scatter", args.in[0].dtype(), a.value);
  same_as(args.in[0], out[0]);
}

// The gradient of a source that is larger than the index: zeros beyond it.
Tensor to_source(Tensor picked, const Shape& source) {
  for (size_t d = 0; d < source.size(); ++d) {
    if (picked.sizes()[d] == source[d]) continue;
    Shape sizes = picked.sizes();
    const int64_t end = sizes[d];
    sizes[d] = source[d];
    picked = call(kSliceBackward, kernel::SliceBackwardAttrs{sizes, static_cast<int64_t>(d), 0, end, 1}, picked);
  }
  return picked;
}

// Dimensions in which all tensors have the same size may be split, except the one that is indexed in x: aBc. Along it
// the index may be split, where that is its letter z.
struct GatherLabels {
  std::string x, index;

  GatherLabels(const Shape& sizes, int64_t dim, std::initializer_list<Shape> others) {
    const auto dims = static_cast<int64_t>(sizes.size());
    x = letters(dims);
    for (const Shape& other : others) {
      for (int64_t d = 0; d < dims; ++d) {
        const auto at = static_cast<size_t>(d);
        if (other.size() != sizes.size() || other[at] != sizes[at]) x = keep_whole(x, d);
      }
    }
    x = keep_whole(x, dim);
    index = replaced(x, dim, 'z');
  }
};

void ways_gather(const ShardCall& call, ShardWays& ways) {
  const Tensor& index = call.in[1];
  if (index.dims() != call.dims(0)) return;
  const GatherLabels l(call.in[0].sizes(), call.attrs.get<DimAttrs>().dim, {index.sizes()});
  ways.split(join({l.x, l.index}, {l.index}));
}

void ways_gather_backward(const ShardCall& call, ShardWays& ways) {
  const Tensor& index = call.in[1];
  if (index.sizes().size() != call.out[0].size()) return;
  const GatherLabels l(call.out[0], call.attrs.get<DimBackwardAttrs>().dim, {index.sizes()});
  ways.split(join({l.index, l.index}, {l.x}), Reduce::kSum);
}

// Where a place is named twice, the last one counts, so the index stays whole along the dimension.
void ways_scatter(const ShardCall& call, ShardWays& ways) {
  const Tensor &index = call.in[1], &source = call.in[2];
  if (index.dims() != call.dims(0) || source.dims() != call.dims(0)) return;
  const GatherLabels l(call.in[0].sizes(), call.attrs.get<DimAttrs>().dim, {index.sizes(), source.sizes()});
  ways.split(join({l.x, l.x, l.x}, {l.x}));
}

void ways_scatter_fill(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<FillAttrs>();
  if (a.value.is_zero()) ways.pass(linear_in({0}));
  if (call.dims(1) != call.dims(0)) return;
  const GatherLabels l(call.in[0].sizes(), a.dim, {call.in[1].sizes()});
  ways.split(join({l.x, l.x}, {l.x}));
}

void ways_scatter_add(const ShardCall& call, ShardWays& ways) {
  const Tensor &index = call.in[1], &source = call.in[2];
  if (index.dims() != call.dims(0) || source.dims() != call.dims(0)) return;
  const int64_t dim = call.attrs.get<DimAttrs>().dim;
  GatherLabels l(call.in[0].sizes(), dim, {index.sizes(), source.sizes()});
  if (index.dims() == 0 || index.size(dim) != source.size(dim)) l.index = keep_whole(l.index, dim);
  ways.split(join({"+" + l.x, l.index, l.index}, {l.x}), Reduce::kSum);
}

}  // namespace

constinit const OpDef kGather{
    .name = "gather",
    .inputs = "x, index",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_gather,
    .cpu = kernel::cpu::gather,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kGatherBackward, DimBackwardAttrs{g.shape(0), g.attrs.get<DimAttrs>().dim}, g.dout[0], g.in[1]), {}};
    },
    .shard = {.ways = ways_gather},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5}), sample_indices({4, 0, 0}, {3})}, DimAttrs{0}},
              {{sample({3, 4}), sample_indices({2, 0, 1, 1, 0, 2}, {2, 3})}, DimAttrs{0}},
              {{sample({2, 3, 2}), sample_indices({2, 0, 1, 1}, {2, 2, 1})}, DimAttrs{-2}}};
    },
    .formula = "x[index[i][j]][j] (dim 0)",
};

constinit const OpDef kGatherBackward{
    .name = "gather_backward",
    .inputs = "dy, index",
    .attrs = attrs_of<DimBackwardAttrs>,
    .dtypes = kAll,
    .infer = infer_gather_backward,
    .cpu = kernel::cpu::gather_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {gather(g.dout[0], g.attrs.get<DimBackwardAttrs>().dim, g.in[1]), {}};
    },
    .shard = {.ways = ways_gather_backward, .local = with_result_sizes<DimBackwardAttrs>},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3}), sample_indices({4, 0, 0}, {3})}, DimBackwardAttrs{{5}, 0}},
              {{sample({2, 3}), sample_indices({2, 0, 1, 1, 0, 2}, {2, 3})}, DimBackwardAttrs{{3, 4}, -2}}};
    },
    .formula = "zeros of the given sizes with dx[index[i][j]][j] += dy[i][j]",
};

constinit const OpDef kScatter{
    .name = "scatter",
    .inputs = "x, index, source",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_scatter,
    .cpu = kernel::cpu::scatter,
    .grad = [](const GradArgs& g) -> Tensors {
      const int64_t dim = g.attrs.get<DimAttrs>().dim;
      return {g.needs(0) ? scatter(g.dout[0], dim, g.in[1], Scalar(0)) : Tensor{},
              {},
              g.needs(2) ? to_source(gather(g.dout[0], dim, g.in[1]), g.shape(2)) : Tensor{}};
    },
    .shard = {.ways = ways_scatter},
    .linear = linear_terms({{0}, {2}}),
    .saves = saves_in({1}),
    .in_place = true,
    // The gradient of a place named twice would go to both: samples name them once.
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5}), sample_indices({4, 0, 1}, {3}), sample({3}, 1)}, DimAttrs{0}},
              {{sample({3, 4}), sample_indices({2, 0, 1, 1, 2, 0}, {2, 3}), sample({2, 4}, 1)}, DimAttrs{0}}};
    },
    .formula = "x with x[index[i][j]][j] = source[i][j] (dim 0)",
};

constinit const OpDef kScatterFill{
    .name = "scatter_fill",
    .inputs = "x, index",
    .attrs = attrs_of<FillAttrs>,
    .dtypes = kAll,
    .infer = infer_scatter_fill,
    .cpu = kernel::cpu::scatter_fill,
    .grad = [](const GradArgs& g) -> Tensors {
      return {scatter(g.dout[0], g.attrs.get<FillAttrs>().dim, g.in[1], Scalar(0)), {}};
    },
    .shard = {.ways = ways_scatter_fill},
    .saves = saves_in({1}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5}), sample_indices({4, 0, 0}, {3})}, FillAttrs{0, 0.5}},
              {{sample({3, 4}), sample_indices({2, 0, 1, 1}, {2, 2})}, FillAttrs{1, 2}}};
    },
    .formula = "x with x[index[i][j]][j] = value (dim 0)",
};

constinit const OpDef kScatterAdd{
    .name = "scatter_add",
    .inputs = "x, index, source",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_scatter,
    .cpu = kernel::cpu::scatter_add,
    .grad = [](const GradArgs& g) -> Tensors {
      const int64_t dim = g.attrs.get<DimAttrs>().dim;
      return {g.dout[0], {}, g.needs(2) ? to_source(gather(g.dout[0], dim, g.in[1]), g.shape(2)) : Tensor{}};
    },
    .shard = {.ways = ways_scatter_add},
    .linear = linear_terms({{0}, {2}}),
    .saves = saves_in({1}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5}), sample_indices({4, 0, 0}, {3}), sample({4}, 1)}, DimAttrs{0}},
              {{sample({3, 4}), sample_indices({2, 0, 1, 1, 2, 0}, {2, 3}), sample({2, 3}, 1)}, DimAttrs{0}},
              {{sample({2, 3, 2}), sample_indices({2, 0, 1, 1}, {2, 2, 1}), sample({2, 2, 1}, 1)}, DimAttrs{-2}}};
    },
    .formula = "x with x[index[i][j]][j] += source[i][j] (dim 0)",
};

}  // namespace chorale::op
