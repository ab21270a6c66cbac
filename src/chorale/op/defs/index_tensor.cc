// Rows of x[i0, i1, …] with tensors as indices.
#include <cctype>

#include "chorale/kernel/cpu/index/index.h"
#include "chorale/kernel/index_layout.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/index_samples.h"
#include "chorale/op/index.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"

namespace chorale::op {
namespace {

void infer_index(const InferArgs& args, std::span<OutSpec> out) {
  out[0].sizes = kernel::index_layout("index", args.in[0].sizes(), args.in.subspan(1)).result;
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}

void infer_index_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Shape sizes = args.attrs.get<SizesAttrs>().sizes.shape();
  const Shape expected = kernel::index_layout("index_backward", sizes, args.in.subspan(1)).result;
  CHORALE_CHECK(args.in[0].sizes() == expected, "[index_backward] a gradient of shape ", expected,
                " was expected, found ", args.in[0].sizes());
  out[0].sizes = sizes;
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}

void infer_index_put(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &values = args.in[1];
  const Shape picked = kernel::index_layout("index_put", x.sizes(), args.in.subspan(2)).result;
  CHORALE_CHECK(
      values.sizes().size() <= picked.size() && broadcast_shapes("index_put", values.sizes(), picked) == picked,
      "[index_put] values of shape ", values.sizes(), " do not broadcast to the ", picked, " that is indexed");
  CHORALE_CHECK(values.dtype() == x.dtype(), "[index_put] values are ", values.dtype(), ", but x is ", x.dtype(),
                "; cast one of them");
  out[0].sizes = x.sizes();
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

// Dimensions of x without an index may be split, and those of the indices: aCd with an index pq for C gives apqd.
struct IndexTensorLabels {
  std::string x, result;
  std::vector<std::string> indices;

  IndexTensorLabels(const Shape& sizes, std::span<const Tensor> list) {
    const kernel::IndexLayout layout = kernel::index_layout("shard", sizes, list);
    const std::string picked = letters(static_cast<int64_t>(layout.picked.size()), 'p');
    x = letters(static_cast<int64_t>(sizes.size()));
    if (!layout.aside) result = picked;
    for (size_t d = 0; d < sizes.size(); ++d) {
      const bool indexed = d < list.size() && list[d].defined();
      if (layout.aside && d == layout.first) result += picked;
      if (indexed) {
        x = keep_whole(x, static_cast<int64_t>(d));
      } else {
        result += x[d];
      }
    }
    for (const Tensor& index : list) {
      indices.push_back(index.defined() ? picked.substr(picked.size() - static_cast<size_t>(index.dims())) : "");
    }
  }
  // Operands in front of the indices.
  std::vector<std::string> with(std::initializer_list<std::string> first) const {
    std::vector<std::string> all = first;
    all.insert(all.end(), indices.begin(), indices.end());
    return all;
  }
};
void ways_index(const ShardCall& call, ShardWays& ways) {
  const IndexTensorLabels l(call.in[0].sizes(), call.in.subspan(1));
  ways.split(join(l.with({l.x}), {l.result}));
}
void ways_index_backward(const ShardCall& call, ShardWays& ways) {
  const IndexTensorLabels l(call.out[0], call.in.subspan(1));
  ways.split(join(l.with({l.result}), {l.x}), Reduce::kSum);
}
// Where a place is named twice, the last one counts, unless values are added up: only then may the indices be split.
void ways_index_put(const ShardCall& call, ShardWays& ways) {
  IndexTensorLabels l(call.in[0].sizes(), call.in.subspan(2));
  const bool accumulate = call.attrs.get<IndexPutAttrs>().accumulate;
  std::string values = l.result.substr(l.result.size() - call.in[1].sizes().size());
  if (!accumulate) {
    for (std::string& index : l.indices) index = keep_whole(index);
    for (char& letter : values) letter = letter >= 'p' ? static_cast<char>(std::toupper(letter)) : letter;
  }
  ways.split(join(l.with({"+" + l.x, values}), {l.x}), Reduce::kSum);
}

// A call with the inputs in front of the same indices.
Tensor with_indices(const OpDef& op, const Attrs& attrs, std::initializer_list<Tensor> first,
                    std::span<const Tensor> indices) {
  Tensors in(first.begin(), first.end());
  in.append(indices.begin(), indices.end());
  return call_list(op, attrs, in);
}

}  // namespace

constinit const OpDef kIndex{
    .name = "index",
    .inputs = "x, indices?...",
    .dtypes = kAll,
    .infer = infer_index,
    .cpu = kernel::cpu::index,
    .grad = [](const GradArgs& g) -> Tensors {
      Tensors din(g.in.size());
      din[0] = with_indices(kIndexBackward, SizesAttrs{g.shape(0)}, {g.dout[0]}, g.in.subspan(1));
      return din;
    },
    .shard = {.ways = ways_index},
    .linear = linear_in({0}),
    .saves = {.in = InputSet::from(1)},
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), sample_indices({3, 0, -1}, {3})}},
              {{sample({3, 4}), sample_indices({2, 0}, {2, 1}), sample_indices({1, 3, -4}, {3})}},
              {{sample({2, 3, 4}), Tensor{}, sample_indices({0, 2, 2}, {3})}},
              {{sample({2, 3, 4}), sample_indices({1, 0}, {2}), Tensor{}, sample_indices({3}, {1})}}};
    },
    .formula = "x[i0, i1, ...]",
};

constinit const OpDef kIndexBackward{
    .name = "index_backward",
    .inputs = "dy, indices?...",
    .attrs = attrs_of<SizesAttrs>,
    .dtypes = kAll,
    .infer = infer_index_backward,
    .cpu = kernel::cpu::index_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      Tensors din(g.in.size());
      din[0] = with_indices(kIndex, {}, {g.dout[0]}, g.in.subspan(1));
      return din;
    },
    .shard = {.ways = ways_index_backward, .local = with_result_sizes<SizesAttrs>},
    .linear = linear_in({0}),
    .saves = {.in = InputSet::from(1)},
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3}), sample_indices({3, 0, -1}, {3})}, SizesAttrs{{4}}},
              {{sample({2, 2, 2}), sample_indices({1, 1}, {2}), Tensor{}, sample_indices({3, 0}, {2, 1})},
               SizesAttrs{{2, 2, 4}},
               false},
              {{sample({2, 3, 4}), Tensor{}, sample_indices({0, 2, 2}, {3})}, SizesAttrs{{2, 3, 4}}}};
    },
    .formula = "zeros of the given sizes with dx[i0, i1, ...] += dy",
};

constinit const OpDef kIndexPut{
    .name = "index_put",
    .inputs = "x, values, indices?...",
    .attrs = attrs_of<IndexPutAttrs>,
    .dtypes = kAll,
    .infer = infer_index_put,
    .cpu = kernel::cpu::index_put,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto indices = g.in.subspan(2);
      const bool accumulate = g.attrs.get<IndexPutAttrs>().accumulate;
      Tensors din(g.in.size());
      if (g.needs(0)) {
        din[0] = accumulate ? g.dout[0]
                            : with_indices(kIndexPut, g.attrs,
                                           {g.dout[0], zeros({}, g.dout[0].dtype(), g.dout[0].device())}, indices);
      }
      if (g.needs(1)) din[1] = with_indices(kIndex, {}, {g.dout[0]}, indices);
      return din;
    },
    .shard = {.ways = ways_index_put},
    .linear = linear_terms({{0}, {1}}),
    .saves = {.in = InputSet::from(2)},
    .in_place = true,
    // The gradient of a place named twice would go to both without accumulation: those samples name each place once.
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), sample({3}, 1), sample_indices({3, 0, -1}, {3})}, IndexPutAttrs{true}},
              {{sample({4}), sample({}, 1), sample_indices({3, 0}, {2})}, IndexPutAttrs{false}},
              {{sample({3, 4}), sample({2, 3}, 1), sample_indices({2, 0}, {2, 1}), sample_indices({1, 3, -4}, {3})},
               IndexPutAttrs{false}},
              {{sample({2, 3, 4}), sample({2, 3}, 1), sample_indices({1, 0}, {2}), Tensor{}, sample_indices({3}, {1})},
               IndexPutAttrs{false}},
              {{sample({2, 3, 4}), sample({3, 1}, 1), Tensor{}, sample_indices({0, 2, 2}, {3})}, IndexPutAttrs{true}}};
    },
    .formula = "x with x[i0, i1, ...] = values, or += values",
};

}  // namespace chorale::op
