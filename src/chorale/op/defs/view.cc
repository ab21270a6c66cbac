// Rows of views. A view has no kernel: its inference says which bytes it shows.
#include "chorale/op/view.h"

#include <algorithm>
#include <string>

#include "chorale/kernel/cpu/view_backward.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

using kernel::View;

void show(const InferArgs& args, View view, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  out[0].sizes = std::move(view.sizes);
  out[0].strides = std::move(view.strides);
  out[0].offset = view.offset;
  out[0].view_of = 0;
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

// The inference of a view whose arithmetic is `view_of(View, Attrs)`.
template <class T, auto view_of>
void infer_view(const InferArgs& args, std::span<OutSpec> out) {
  show(args, view_of(View::of(args.in[0]), args.attrs.get<T>()), out);
}

// A dimension that is sliced stays whole, unless nothing of it is left out.
void ways_slice(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<SliceAttrs>();
  const bool all = a.step == 1 && call.out[0] == call.in[0].sizes();
  const std::string x = all ? letters(call.dims(0)) : keep_whole(letters(call.dims(0)), a.dim);
  ways.split(join({x}, {x}));
}

void ways_select(const ShardCall& call, ShardWays& ways) {
  const int64_t dim = call.attrs.get<SelectAttrs>().dim;
  const std::string x = keep_whole(letters(call.dims(0)), dim);
  ways.split(join({x}, {without(x, dim)}));
}

void ways_permute(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(0));
  std::string result;
  for (int64_t dim : call.attrs.get<DimsAttrs>().dims)
    result += x[static_cast<size_t>(normalize_dim("permute", dim, call.dims(0)))];
  ways.split(join({x}, {result}));
}

// The shapes are cut into groups of dimensions with equal products: [2, 3, 5] and [6, 5] into 2 x 3 = 6 and 5 = 5. The
// first dimension of a group may be split where its chunks have as many elements as those of the other shape.
void ways_view(const ShardCall& call, ShardWays& ways) {
  const Shape &from = call.in[0].sizes(), &to = call.out[0];
  if (count_elems(from) == 0) return;
  const auto skip_ones = [](const Shape& shape, size_t at) {
    while (at < shape.size() && shape[at] == 1) ++at;
    return at;
  };
  size_t i = skip_ones(from, 0), j = skip_ones(to, 0);
  while (i < from.size() && j < to.size()) {
    const size_t first_i = i, first_j = j;
    int64_t left = from[i++], right = to[j++];
    while (left != right) {
      int64_t& smaller = left < right ? left : right;
      smaller *= left < right ? from[i++] : to[j++];
    }
    const auto chunk_elems = [&](int64_t size) { return chunk_of(size, call.shards, 0).size * (left / size); };
    if (chunk_elems(from[first_i]) == chunk_elems(to[first_j])) {
      ways.add({Placement::shard(static_cast<int64_t>(first_i))}, {Placement::shard(static_cast<int64_t>(first_j))});
    }
    i = skip_ones(from, i);
    j = skip_ones(to, j);
  }
}

void ways_squeeze(const ShardCall& call, ShardWays& ways) {
  std::string x = letters(call.dims(0));
  for (int64_t dim : call.attrs.get<DimsAttrs>().dims) x = keep_whole(x, dim);
  std::string result = x;
  std::erase_if(result, [](char letter) { return letter < 'a'; });
  ways.split(join({x}, {result}));
}

void ways_unsqueeze(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(0));
  const int64_t dim = normalize_dim("unsqueeze", call.attrs.get<DimAttrs>().dim, call.dims(0) + 1);
  ways.split(join({x}, {std::string(x).insert(static_cast<size_t>(dim), 1, 'Z')}));
}

void ways_unfold(const ShardCall& call, ShardWays& ways) {
  const std::string x = keep_whole(letters(call.dims(0)), call.attrs.get<UnfoldAttrs>().dim);
  ways.split(join({x}, {x + "Z"}));
}

void ways_diagonal(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<DiagonalAttrs>();
  const std::string x = keep_whole(keep_whole(letters(call.dims(0)), a.dim1), a.dim2);
  std::string result = x;
  std::erase_if(result, [](char letter) { return letter < 'a'; });
  ways.split(join({x}, {result + "Z"}));
}

void infer_as_strided(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<AsStridedAttrs>();
  const Shape sizes = a.sizes.shape(), strides = a.strides.shape();
  CHORALE_CHECK(sizes.size() == strides.size(), "[as_strided] ", sizes.size(), " sizes ", sizes, " but ",
                strides.size(), " strides ", strides);
  const int64_t first = x.offset() + a.offset;
  int64_t last = first;
  const bool empty = count_elems(sizes) == 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHORALE_CHECK(strides[i] >= 0, "[as_strided] stride ", strides[i], " in ", strides, " is negative");
    int64_t span = 0;
    const bool overflow = !empty && (__builtin_mul_overflow(sizes[i] - 1, strides[i], &span) ||
                                     __builtin_add_overflow(last, span, &last));
    CHORALE_CHECK(!overflow, "[as_strided] sizes ", sizes, " with strides ", strides, " reach too far");
  }
  const auto capacity = static_cast<int64_t>(x.storage()->bytes() / x.elem_bytes());
  CHORALE_CHECK(first >= 0 && (empty || last < capacity), "[as_strided] sizes ", sizes, " with strides ", strides,
                " and offset ", first, " reach elements ", first, " to ", last, " of a storage of ", capacity);
  show(args, {sizes, strides, first}, out);
}

void infer_like_input(const InferArgs& args, std::span<OutSpec> out) {
  out[0].sizes = args.in[0].sizes();
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}

void infer_flip(const InferArgs& args, std::span<OutSpec> out) {
  uint32_t seen = 0;
  for (int64_t entry : args.attrs.get<DimsAttrs>().dims) {
    const int64_t dim = normalize_dim("flip", entry, args.in[0].dims());
    CHORALE_CHECK(!(seen >> dim & 1u), "[flip] dimension ", dim, " appears twice in ",
                  args.attrs.get<DimsAttrs>().dims.shape());
    seen |= 1u << dim;
  }
  infer_like_input(args, out);
}

void ways_flip(const ShardCall& call, ShardWays& ways) {
  std::string x = letters(call.dims(0));
  for (int64_t dim : call.attrs.get<DimsAttrs>().dims) x = keep_whole(x, dim);
  ways.split(join({x}, {x}));
}

}  // namespace

constinit const OpDef kSlice{
    .name = "slice",
    .inputs = "x",
    .attrs = attrs_of<SliceAttrs>,
    .dtypes = kAll,
    .infer = infer_view<SliceAttrs, kernel::slice_view>,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<SliceAttrs>();
      return {call(kSliceBackward, kernel::SliceBackwardAttrs{g.shape(0), a.dim, a.start, a.end, a.step}, g.dout[0])};
    },
    .shard = {.ways = ways_slice},
    .linear = linear_in({0}),
    .view = true,
    .part = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5})}, SliceAttrs{0, 1, 4, 1}},
              {{sample({3, 7})}, SliceAttrs{1, 1, kEnd, 2}},
              {{sample({4, 3, 2})}, SliceAttrs{-2, -2, -1, 1}},
              {{sample({4, 3})}, SliceAttrs{0, 2, 2, 1}}};
    },
    .formula = "x[start:end:step] along dim",
};

constinit const OpDef kSelect{
    .name = "select",
    .inputs = "x",
    .attrs = attrs_of<SelectAttrs>,
    .dtypes = kAll,
    .infer = infer_view<SelectAttrs, kernel::select_view>,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<SelectAttrs>();
      const int64_t dim = normalize_dim("select", a.dim, static_cast<int64_t>(g.shape(0).size()));
      const int64_t index = a.index < 0 ? a.index + g.shape(0)[static_cast<size_t>(dim)] : a.index;
      return {call(kSliceBackward, kernel::SliceBackwardAttrs{g.shape(0), dim, index, index + 1, 1},
                   unsqueeze(g.dout[0], dim))};
    },
    .shard = {.ways = ways_select},
    .linear = linear_in({0}),
    .view = true,
    .part = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5})}, SelectAttrs{0, 3}},
              {{sample({3, 4})}, SelectAttrs{1, -1}},
              {{sample({2, 3, 4})}, SelectAttrs{-2, 1}}};
    },
    .formula = "x[index] along dim",
};

// The same bytes without history. A row, so that a trace and shards see it.
constinit const OpDef kDetach{
    .name = "detach",
    .inputs = "x",
    .dtypes = kAll,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          const Tensor& x = args.in[0];
          out[0].sizes = x.sizes();
          out[0].dtype = x.dtype();
          out[0].device = x.device();
          out[0].strides = x.strides();
          out[0].view_of = 0;
          out[0].offset = x.offset();
        },
    .grad = not_differentiable,
    .shard = kShardElementwise,
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 3})}}, {{sample({})}}};
    },
    .formula = "x, and no gradient",
};

constinit const OpDef kPermute{
    .name = "permute",
    .inputs = "x",
    .attrs = attrs_of<DimsAttrs>,
    .dtypes = kAll,
    .infer = infer_view<DimsAttrs, kernel::permute_view>,
    .grad = [](const GradArgs& g) -> Tensors {
      const IntList& dims = g.attrs.get<DimsAttrs>().dims;
      const auto count = static_cast<int64_t>(dims.size());
      IntList inverse = dims;
      for (int64_t i = 0; i < count; ++i)
        inverse.values[normalize_dim("permute", dims[static_cast<size_t>(i)], count)] = i;
      return {permute(g.dout[0], inverse)};
    },
    .shard = {.ways = ways_permute},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 4})}, DimsAttrs{{1, 0}}},
              {{sample({2, 3, 4})}, DimsAttrs{{2, 0, -2}}},
              {{sample({2, 3, 1, 2})}, DimsAttrs{{0, 3, 1, 2}}}};
    },
    .formula = "dimension i of the result is dimension dims[i] of x",
};

constinit const OpDef kExpand{
    .name = "expand",
    .inputs = "x",
    .attrs = attrs_of<SizesAttrs>,
    .dtypes = kAll,
    .infer = infer_view<SizesAttrs, kernel::expand_view>,
    .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },  // summed to x's shape by the caller
    .shard = {.labels = kElementwiseLabels, .local = with_result_sizes<SizesAttrs>},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 1})}, SizesAttrs{{-1, 4}}},
              {{sample({4})}, SizesAttrs{{2, 3, -1}}},
              {{sample({})}, SizesAttrs{{2, 2}}}};
    },
    .formula = "x with dimensions of size 1 repeated; -1 keeps a dimension",
};

constinit const OpDef kView{
    .name = "view",
    .inputs = "x",
    .attrs = attrs_of<SizesAttrs>,
    .dtypes = kAll,
    .infer = infer_view<SizesAttrs, kernel::reshape_view>,
    .grad = [](const GradArgs& g) -> Tensors { return {reshape(g.dout[0], g.shape(0))}; },
    .shard = {.ways = ways_view, .local = with_result_sizes<SizesAttrs>},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 6})}, SizesAttrs{{3, 4}}},
              {{sample({2, 3, 2})}, SizesAttrs{{2, -1}}},
              {{sample({6, 1, 4})}, SizesAttrs{{3, 2, 2, 2}}},
              {{sample({1})}, SizesAttrs{}}};
    },
    .formula = "the same elements under another shape",
};

constinit const OpDef kSqueeze{
    .name = "squeeze",
    .inputs = "x",
    .attrs = attrs_of<DimsAttrs>,
    .dtypes = kAll,
    .infer = infer_view<DimsAttrs, kernel::squeeze_view>,
    .grad = [](const GradArgs& g) -> Tensors { return {reshape(g.dout[0], g.shape(0))}; },
    .shard = {.ways = ways_squeeze},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({1, 3})}, DimsAttrs{{0}}}, {{sample({2, 1, 3, 1})}, DimsAttrs{{1, -1}}}};
    },
    .formula = "x without the dimensions dims, of size 1",
};

constinit const OpDef kUnsqueeze{
    .name = "unsqueeze",
    .inputs = "x",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_view<DimAttrs, kernel::unsqueeze_view>,
    .grad = [](const GradArgs& g) -> Tensors { return {reshape(g.dout[0], g.shape(0))}; },
    .shard = {.ways = ways_unsqueeze},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3})}, DimAttrs{0}}, {{sample({2, 3})}, DimAttrs{-1}}, {{sample({2, 3})}, DimAttrs{1}}};
    },
    .formula = "x with a new dimension of size 1",
};

constinit const OpDef kUnfold{
    .name = "unfold",
    .inputs = "x",
    .attrs = attrs_of<UnfoldAttrs>,
    .dtypes = kAll,
    .infer = infer_view<UnfoldAttrs, kernel::unfold_view>,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<UnfoldAttrs>();
      return {call(kUnfoldBackward, kernel::UnfoldBackwardAttrs{g.shape(0), a.dim, a.size, a.step}, g.dout[0])};
    },
    .shard = {.ways = ways_unfold},
    .linear = linear_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({7})}, UnfoldAttrs{0, 3, 1}},
              {{sample({2, 6, 2})}, UnfoldAttrs{1, 2, 3}},
              {{sample({3, 5})}, UnfoldAttrs{-1, 3, 2}}};
    },
    .formula = "windows of size elements, step apart, along dim; the window comes last",
};

constinit const OpDef kDiagonal{
    .name = "diagonal",
    .inputs = "x",
    .attrs = attrs_of<DiagonalAttrs>,
    .dtypes = kAll,
    .infer = infer_view<DiagonalAttrs, kernel::diagonal_view>,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<DiagonalAttrs>();
      return {call(kDiagonalBackward, kernel::DiagonalBackwardAttrs{g.shape(0), a.offset, a.dim1, a.dim2}, g.dout[0])};
    },
    .shard = {.ways = ways_diagonal},
    .linear = linear_in({0}),
    .view = true,
    .part = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 3})}, DiagonalAttrs{}},
              {{sample({3, 4})}, DiagonalAttrs{1, 0, 1}},
              {{sample({2, 4, 3})}, DiagonalAttrs{-1, -2, -1}},
              {{sample({2, 3})}, DiagonalAttrs{5, 0, 1}}};
    },
    .formula = "x[i, i + offset] over dim1 and dim2, as the last dimension",
};

constinit const OpDef kAsStrided{
    .name = "as_strided",
    .inputs = "x",
    .attrs = attrs_of<AsStridedAttrs>,
    .dtypes = kAll,
    .infer = infer_as_strided,
    // Reads only how x lies in memory.
    .grad = [](const GradArgs& g) -> Tensors { return {call(kAsStridedBackward, g.attrs, g.dout[0], g.in[0])}; },
    .twice = false,
    .shard = kReplicateOnly,
    .saves = saves_in({0}),
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 4})}, AsStridedAttrs{{2, 2}, {4, 2}, 1}},
              {{sample({6})}, AsStridedAttrs{{4, 3}, {1, 1}, 0}},
              {{sample({6})}, AsStridedAttrs{{}, {}, 2}}};
    },
    .formula = "x's storage under any sizes, strides and offset",
};

constinit const OpDef kFlip{
    .name = "flip",
    .inputs = "x",
    .attrs = attrs_of<DimsAttrs>,
    .dtypes = kAll,
    .infer = infer_flip,
    .cpu = kernel::cpu::flip,
    .grad = [](const GradArgs& g) -> Tensors { return {flip(g.dout[0], g.attrs.get<DimsAttrs>().dims)}; },
    .shard = {.ways = ways_flip},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {
          {{sample({5})}, DimsAttrs{{0}}}, {{sample({2, 3, 4})}, DimsAttrs{{0, -1}}}, {{sample({3, 2})}, DimsAttrs{}}};
    },
    .formula = "x with the dimensions dims reversed",
};

Rows view_rows() {
  static constexpr const OpDef* kRows[] = {
      &kDetach,         &kSlice,
      &kSelect,         &kPermute,
      &kExpand,         &kView,
      &kSqueeze,        &kUnsqueeze,
      &kUnfold,         &kDiagonal,
      &kAsStrided,      &kFlip,
      &kSliceBackward,  &kDiagonalBackward,
      &kUnfoldBackward, &kAsStridedBackward,
  };
  return kRows;
}

}  // namespace chorale::op
