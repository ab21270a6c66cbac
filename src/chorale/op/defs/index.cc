// Rows of ops with a vector of indices along one dimension.
#include "chorale/op/index.h"

#include <string>

#include "chorale/kernel/cpu/index/index.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

void like(const Tensor& x, OutSpec& out) {
  out.sizes = x.sizes();
  out.dtype = x.dtype();
  out.device = x.device();
}

// The dimension, after checking that the index is a vector (or one index) of integers.
size_t check_index_vector(const char* op, const Shape& x, int64_t dim, const Tensor& index) {
  CHORALE_CHECK(index.dtype() == DType::kI64 || index.dtype() == DType::kI32, "[", op, "] indices are i64 or i32, not ",
                index.dtype());
  CHORALE_CHECK(index.dims() <= 1, "[", op, "] the index must be a vector, found shape ", index.sizes());
  return static_cast<size_t>(normalize_dim(op, dim, static_cast<int64_t>(x.size())));
}

// x with the index's length along the dimension; a scalar stays one.
Shape selected(const Shape& x, size_t dim, const Tensor& index) {
  Shape sizes = x;
  if (!sizes.empty()) sizes[dim] = index.elems();
  return sizes;
}

void infer_index_select(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const size_t dim = check_index_vector("index_select", x.sizes(), args.attrs.get<DimAttrs>().dim, args.in[1]);
  CHORALE_CHECK(x.dims() > 0 || args.in[1].elems() == 1, "[index_select] a scalar takes one index, not ",
                args.in[1].sizes());
  like(x, out[0]);
  out[0].sizes = selected(x.sizes(), dim, args.in[1]);
}

void infer_index_select_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<DimBackwardAttrs>();
  const Shape sizes = a.sizes.shape();
  const size_t dim = check_index_vector("index_select_backward", sizes, a.dim, args.in[1]);
  CHORALE_CHECK(args.in[0].sizes() == selected(sizes, dim, args.in[1]), "[index_select_backward] a gradient of shape ",
                selected(sizes, dim, args.in[1]), " was expected, found ", args.in[0].sizes());
  like(args.in[0], out[0]);
  out[0].sizes = sizes;
}

// index_add and index_copy: x, index, source.
void infer_placing(const InferArgs& args, int64_t dim, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &index = args.in[1], &source = args.in[2];
  const char* op = args.op.name;
  const size_t at = check_index_vector(op, x.sizes(), dim, index);
  CHORALE_CHECK(source.sizes() == selected(x.sizes(), at, index), "[", op, "] a source of shape ",
                selected(x.sizes(), at, index), " was expected for ", index.elems(), " indices into ", x.sizes(),
                ", found ", source.sizes());
  CHORALE_CHECK(source.dtype() == x.dtype(), "[", op, "] the source is ", source.dtype(), ", but x is ", x.dtype(),
                "; cast one of them");
  like(x, out[0]);
}
template <class T>
void infer_placing_of(const InferArgs& args, std::span<OutSpec> out) {
  infer_placing(args, args.attrs.get<T>().dim, out);
}

void infer_index_fill(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<FillAttrs>();
  check_index_vector("index_fill", args.in[0].sizes(), a.dim, args.in[1]);
  CHORALE_CHECK(is_complex(args.in[0].dtype()) || a.value.kind() != Scalar::Kind::kComplex,
                "[index_fill] a complex value cannot be written into ", args.in[0].dtype());
  check_held("index_fill", args.in[0].dtype(), a.value);
  like(args.in[0], out[0]);
}

// The dimension of x that is indexed stays whole, the index z may be split: aBc,z->azc. A single index is no list.
struct IndexLabels {
  std::string x, index, picked;

  IndexLabels(int64_t dims, int64_t index_dims, int64_t dim) {
    x = keep_whole(letters(dims), dim);
    index = index_dims > 0 ? "z" : "";
    picked = replaced(x, dim, index_dims > 0 && dims > 0 ? 'z' : 'Z');
    if (dims == 0) index = keep_whole(index);
  }
};
void ways_index_select(const ShardCall& call, ShardWays& ways) {
  const IndexLabels l(call.dims(0), call.dims(1), call.attrs.get<DimAttrs>().dim);
  ways.split(join({l.x, l.index}, {l.picked}));
}
void ways_index_select_backward(const ShardCall& call, ShardWays& ways) {
  const IndexLabels l(call.dims(0), call.dims(1), call.attrs.get<DimBackwardAttrs>().dim);
  ways.split(join({l.picked, l.index}, {l.x}), Reduce::kSum);
}
void ways_index_add(const ShardCall& call, ShardWays& ways) {
  const IndexLabels l(call.dims(0), call.dims(1), call.attrs.get<IndexAddAttrs>().dim);
  ways.split(join({"+" + l.x, l.index, l.picked}, {l.x}), Reduce::kSum);
}
// Where a place is named twice, the last one counts, so the index stays whole.
void ways_index_copy(const ShardCall& call, ShardWays& ways) {
  const IndexLabels l(call.dims(0), call.dims(1), call.attrs.get<DimAttrs>().dim);
  ways.split(join({l.x, keep_whole(l.index), l.x}, {l.x}));
}
void ways_index_fill(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<FillAttrs>();
  const IndexLabels l(call.dims(0), call.dims(1), a.dim);
  ways.split(join({l.x, keep_whole(l.index)}, {l.x}));
  if (a.value.is_zero()) ways.pass(linear_in({0}));
}

Tensor index_list(std::initializer_list<int64_t> list) {
  return Tensor::from(list, {static_cast<int64_t>(list.size())});
}

}  // namespace

constinit const OpDef kIndexSelect{
    .name = "index_select",
    .inputs = "x, index",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_index_select,
    .cpu = kernel::cpu::index_select,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kIndexSelectBackward, DimBackwardAttrs{g.shape(0), g.attrs.get<DimAttrs>().dim}, g.dout[0], g.in[1]),
              {}};
    },
    .shard = {.ways = ways_index_select},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), index_list({2, 0, 2})}, DimAttrs{0}},
              {{sample({3, 5, 2}), index_list({4, 4, 1, 0})}, DimAttrs{-2}},
              {{sample({3, 5}), index_list({1})}, DimAttrs{1}}};
    },
    .formula = "slices of x along dim",
};

constinit const OpDef kIndexSelectBackward{
    .name = "index_select_backward",
    .inputs = "dy, index",
    .attrs = attrs_of<DimBackwardAttrs>,
    .dtypes = kAll,
    .infer = infer_index_select_backward,
    .cpu = kernel::cpu::index_select_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {index_select(g.dout[0], g.attrs.get<DimBackwardAttrs>().dim, g.in[1]), {}};
    },
    .shard = {.ways = ways_index_select_backward, .local = with_result_sizes<DimBackwardAttrs>},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3}), index_list({2, 0, 2})}, DimBackwardAttrs{{4}, 0}},
              {{sample({3, 4, 2}), index_list({4, 4, 1, 0})}, DimBackwardAttrs{{3, 5, 2}, 1}}};
    },
    .formula = "zeros of the given sizes with dy added at index",
};

constinit const OpDef kIndexAdd{
    .name = "index_add",
    .inputs = "x, index, source",
    .attrs = attrs_of<IndexAddAttrs>,
    .dtypes = kAll,
    .infer = infer_placing_of<IndexAddAttrs>,
    .cpu = kernel::cpu::index_add,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<IndexAddAttrs>();
      Tensor dsource;
      if (g.needs(2)) {
        dsource = index_select(g.dout[0], a.dim, g.in[1]);
        if (!(a.alpha == Scalar(1))) dsource = mul(dsource, a.alpha);
      }
      return {g.dout[0], {}, dsource};
    },
    .shard = {.ways = ways_index_add},
    .linear = linear_terms({{0}, {2}}),
    .saves = saves_in({1}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), index_list({2, 0, 2}), sample({3}, 1)}, IndexAddAttrs{0, 1}},
              {{sample({3, 5, 2}), index_list({4, 4, 1}), sample({3, 3, 2}, 1)}, IndexAddAttrs{1, 0.5}}};
    },
    .formula = "x with alpha * source added at index along dim",
};

constinit const OpDef kIndexCopy{
    .name = "index_copy",
    .inputs = "x, index, source",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_placing_of<DimAttrs>,
    .cpu = kernel::cpu::index_copy,
    .grad = [](const GradArgs& g) -> Tensors {
      const int64_t dim = g.attrs.get<DimAttrs>().dim;
      return {g.needs(0) ? index_fill(g.dout[0], dim, g.in[1], 0) : Tensor{},
              {},
              g.needs(2) ? index_select(g.dout[0], dim, g.in[1]) : Tensor{}};
    },
    .shard = {.ways = ways_index_copy},
    .linear = linear_terms({{0}, {2}}),
    .saves = saves_in({1}),
    .in_place = true,
    // The gradient of a place named twice would go to both: samples name them once.
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), index_list({2, 0, 1}), sample({3}, 1)}, DimAttrs{0}},
              {{sample({3, 5, 2}), index_list({4, 1}), sample({3, 2, 2}, 1)}, DimAttrs{1}}};
    },
    .formula = "x with source copied to index along dim",
};

constinit const OpDef kIndexFill{
    .name = "index_fill",
    .inputs = "x, index",
    .attrs = attrs_of<FillAttrs>,
    .dtypes = kAll,
    .infer = infer_index_fill,
    .cpu = kernel::cpu::index_fill,
    .grad = [](const GradArgs& g) -> Tensors {
      return {index_fill(g.dout[0], g.attrs.get<FillAttrs>().dim, g.in[1], 0), {}};
    },
    .shard = {.ways = ways_index_fill},
    .saves = saves_in({1}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), index_list({2, 0, 2})}, FillAttrs{0, 0.5}},
              {{sample({3, 5, 2}), index_list({4, 1})}, FillAttrs{-2, 2}}};
    },
    .formula = "x with a value at index along dim",
};

Rows index_rows() {
  static constexpr const OpDef* kRows[] = {
      &kIndexSelect, &kIndexSelectBackward, &kIndexAdd, &kIndexCopy,    &kIndexFill,
      &kGather,      &kGatherBackward,      &kScatter,  &kScatterFill,  &kScatterAdd,
      &kIndex,       &kIndexBackward,       &kIndexPut, &kMaskedSelect, &kMaskedScatter,
      &kNonzero,
  };
  return kRows;
}

}  // namespace chorale::op
