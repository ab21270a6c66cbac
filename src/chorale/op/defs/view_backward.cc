// Rows of the gradients of views: zeros of the viewed shape, with the gradient added through the same view.
#include "chorale/kernel/cpu/view_backward.h"

#include "chorale/kernel/view.h"
#include "chorale/op/builder.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::DiagonalBackwardAttrs;
using kernel::SliceBackwardAttrs;
using kernel::UnfoldBackwardAttrs;
using kernel::View;

// `view` is what the forward op made of a tensor of `sizes`.
void infer_through(const InferArgs& args, const View& view, const Shape& sizes, std::span<OutSpec> out) {
  const Tensor& dy = args.in[0];
  CHORALE_CHECK(dy.sizes() == view.sizes, "[", args.op.name, "] a gradient of shape ", view.sizes,
                " was expected, found ", dy.sizes());
  out[0].sizes = sizes;
  out[0].dtype = dy.dtype();
  out[0].device = dy.device();
}

template <class T, auto view_of>
void infer_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<T>();
  const Shape sizes = a.sizes.shape();
  infer_through(args, view_of(View::contiguous(sizes), kernel::forward_of(a)), sizes, out);
}

// The rules of the views themselves, from the other side.
void ways_slice_backward(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<SliceBackwardAttrs>();
  const bool all = a.step == 1 && call.out[0] == call.in[0].sizes();
  const std::string x = all ? letters(call.dims(0)) : keep_whole(letters(call.dims(0)), a.dim);
  ways.split(join({x}, {x}));
}

void ways_diagonal_backward(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<DiagonalBackwardAttrs>();
  const std::string x = keep_whole(keep_whole(letters(call.dims(0) + 1), a.dim1), a.dim2);
  std::string dy = x;
  std::erase_if(dy, [](char letter) { return letter < 'a'; });
  ways.split(join({dy + "Z"}, {x}));
}

void ways_unfold_backward(const ShardCall& call, ShardWays& ways) {
  const std::string x =
      keep_whole(letters(static_cast<int64_t>(call.out[0].size())), call.attrs.get<UnfoldBackwardAttrs>().dim);
  ways.split(join({x + "Z"}, {x}));
}

void infer_as_strided_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<AsStridedAttrs>();
  infer_through(args, {a.sizes.shape(), a.strides.shape(), 0}, args.in[1].sizes(), out);
}

}  // namespace

constinit const OpDef kSliceBackward{
    .name = "slice_backward",
    .inputs = "dy",
    .attrs = attrs_of<SliceBackwardAttrs>,
    .dtypes = kAll,
    .infer = infer_backward<SliceBackwardAttrs, kernel::slice_view>,
    .cpu = kernel::cpu::slice_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kSlice, kernel::forward_of(g.attrs.get<SliceBackwardAttrs>()), g.dout[0])};
    },
    .shard = {.ways = ways_slice_backward, .local = with_result_sizes<SliceBackwardAttrs>},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3})}, SliceBackwardAttrs{{5}, 0, 1, 4, 1}},
              {{sample({2, 3})}, SliceBackwardAttrs{{2, 7}, -1, 1, kEnd, 2}},
              {{sample({2, 1, 3})}, SliceBackwardAttrs{{2, 3, 3}, 1, -2, -1, 1}},
              {{sample({0, 2})}, SliceBackwardAttrs{{3, 2}, 0, 1, 1, 1}}};
    },
    .formula = "dx with dx[start:end:step] = dy along dim, 0 elsewhere",
};

constinit const OpDef kDiagonalBackward{
    .name = "diagonal_backward",
    .inputs = "dy",
    .attrs = attrs_of<DiagonalBackwardAttrs>,
    .dtypes = kAll,
    .infer = infer_backward<DiagonalBackwardAttrs, kernel::diagonal_view>,
    .cpu = kernel::cpu::diagonal_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kDiagonal, kernel::forward_of(g.attrs.get<DiagonalBackwardAttrs>()), g.dout[0])};
    },
    .shard = {.ways = ways_diagonal_backward, .local = with_result_sizes<DiagonalBackwardAttrs>},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3})}, DiagonalBackwardAttrs{{3, 3}, 0, 0, 1}},
              {{sample({2, 3})}, DiagonalBackwardAttrs{{2, 4, 3}, -1, -2, -1}},
              {{sample({0})}, DiagonalBackwardAttrs{{2, 3}, 5, 0, 1}}};
    },
    .formula = "dx with dy on a diagonal, 0 elsewhere",
};

constinit const OpDef kUnfoldBackward{
    .name = "unfold_backward",
    .inputs = "dy",
    .attrs = attrs_of<UnfoldBackwardAttrs>,
    .dtypes = kAll,
    .infer = infer_backward<UnfoldBackwardAttrs, kernel::unfold_view>,
    .cpu = kernel::cpu::unfold_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kUnfold, kernel::forward_of(g.attrs.get<UnfoldBackwardAttrs>()), g.dout[0])};
    },
    .shard = {.ways = ways_unfold_backward, .local = with_result_sizes<UnfoldBackwardAttrs>},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5, 3})}, UnfoldBackwardAttrs{{7}, 0, 3, 1}},
              {{sample({2, 2, 2, 2})}, UnfoldBackwardAttrs{{2, 6, 2}, 1, 2, 3}},
              {{sample({3, 2, 3})}, UnfoldBackwardAttrs{{3, 5}, -1, 3, 2}}};
    },
    .formula = "dx, each element the sum of dy over the windows that hold it",
};

constinit const OpDef kAsStridedBackward{
    .name = "as_strided_backward",
    .inputs = "dy, x",  // of x, only how it lies in memory is read
    .attrs = attrs_of<AsStridedAttrs>,
    .dtypes = kFloats | kComplexes,
    .infer = infer_as_strided_backward,
    .cpu = kernel::cpu::as_strided_backward,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2}), sample({3, 4}, 1)}, AsStridedAttrs{{2, 2}, {4, 2}, 1}, false},
              {{sample({4, 3}), sample({6}, 1)}, AsStridedAttrs{{4, 3}, {1, 1}, 0}, false}};
    },
    .formula = "dx, each element the sum of dy over the places that show it",
};

}  // namespace chorale::op
