// Order: sorting, the largest few, distinct values, places in a sorted list, counts.
#include "chorale/op/order.h"

#include <array>

#include "chorale/kernel/cpu/index/sort.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/reduce_common.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"

namespace chorale {
namespace op {

using kernel::BincountAttrs;
using kernel::SearchAttrs;
using kernel::SortAttrs;
using kernel::TopkAttrs;
using kernel::UniqueAttrs;

namespace {

// "aB->aB,aB": what is ordered stays on one rank.
template <class A>
void ways_order(const ShardCall& call, ShardWays& ways) {
  const std::string each = keep_whole(letters(call.dims(0)), call.attrs.get<A>().dim);
  ways.split(join({each}, {each, each}));
}

// Values came from x[indices] along dim.
template <class A>
Tensors order_grad(const GradArgs& g) {
  return {place(g.dout[0], g.out[1], g.shape(0), g.attrs.get<A>().dim)};
}

constexpr Saves kSavesOrder{.out = {1}};

constexpr OpDef kSort{
    .name = "sort",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<SortAttrs>,
    .dtypes = kReals,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          const Tensor& x = args.in[0];
          normalize_dim("sort", args.attrs.get<SortAttrs>().dim, x.dims());
          out[0] = {spec_of(x)};
          out[1] = {{.sizes = x.sizes(), .dtype = DType::kI64, .device = x.device()}};
        },
    .cpu = kernel::cpu::sort,
    .grad = order_grad<SortAttrs>,
    .shard = {.ways = ways_order<SortAttrs>},
    .saves = kSavesOrder,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 5})}, SortAttrs{-1, false}},
              {{sample({4, 3}, 1)}, SortAttrs{0, true}},
              {{sample({2, 3, 2}, 2)}, SortAttrs{1, false}},
              {{sample({}, 3)}, SortAttrs{}}};
    },
    .formula = "x in order along dim, and where it was",
};

constexpr OpDef kTopk{
    .name = "topk",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<TopkAttrs>,
    .dtypes = kReals,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          const auto& attrs = args.attrs.get<TopkAttrs>();
          const Tensor& x = args.in[0];
          const auto dim = static_cast<size_t>(normalize_dim("topk", attrs.dim, x.dims()));
          const int64_t n = x.dims() == 0 ? 1 : x.sizes()[dim];
          CHORALE_CHECK(attrs.k >= 0 && attrs.k <= n, "[topk] k is ", attrs.k, ", but dimension ", attrs.dim,
                        " of shape ", x.sizes(), " has ", n, " elements");
          Shape sizes = x.sizes();
          if (!sizes.empty()) sizes[dim] = attrs.k;
          out[0] = {{.sizes = sizes, .dtype = x.dtype(), .device = x.device()}};
          out[1] = {{.sizes = sizes, .dtype = DType::kI64, .device = x.device()}};
        },
    .cpu = kernel::cpu::topk,
    .grad = order_grad<TopkAttrs>,
    .shard = {.ways = ways_order<TopkAttrs>},
    .saves = kSavesOrder,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 9})}, TopkAttrs{2, -1, true}},
              {{sample({4, 3}, 1)}, TopkAttrs{3, 0, false}},
              {{sample({2, 12, 2}, 2)}, TopkAttrs{1, 1, true}}};
    },
    .formula = "the k largest of x along dim, and where they are",
};

constexpr OpDef kUnique{
    .name = "unique",
    .inputs = "x",
    .outputs = 3,
    .attrs = attrs_of<UniqueAttrs>,
    .dtypes = kReals,
    .cpu = kernel::cpu::unique,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample_ints({3, 4}, 0, 5)}, UniqueAttrs{true, true}}, {{sample({7}, 1)}, UniqueAttrs{false, true}}};
    },
    .formula = "distinct values of x in order",
};

void infer_searchsorted(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &boundaries = args.in[0], &values = args.in[1];
  CHORALE_CHECK(boundaries.dtype() == values.dtype(), "[searchsorted] boundaries are ", boundaries.dtype(),
                " and values ", values.dtype());
  bool fits = boundaries.dims() == 1 || boundaries.dims() == values.dims();
  for (int64_t d = 0; fits && d + 1 < boundaries.dims(); ++d) fits = boundaries.size(d) == values.size(d);
  CHORALE_CHECK(fits && boundaries.dims() > 0,
                "[searchsorted] boundaries must be one list or one for each row of values: ", boundaries.sizes(),
                " and ", values.sizes(), " differ before the last dimension");
  out[0] = {{.sizes = values.sizes(), .dtype = DType::kI64, .device = values.device()}};
}

constexpr OpDef kSearchsorted{
    .name = "searchsorted",
    .inputs = "boundaries, values",
    .attrs = attrs_of<SearchAttrs>,
    .dtypes = kReals,
    .infer = infer_searchsorted,
    .cpu = kernel::cpu::searchsorted,
    .grad = not_differentiable,
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    const std::string values = letters(call.dims(1));
                    const std::string rows = call.dims(0) == call.dims(1) ? values.substr(0, values.size() - 1) : "";
                    ways.split(join({rows + "Z", values}, {values}));
                  }},
    .samples = []() -> std::vector<Sample> {
      const Tensor sorted = Tensor::from<double>({-1, -0.5, 0.25, 1, 1.5}, {5});
      const Tensor rows = Tensor::from<double>({-1, 0, 1, -2, -1, 0}, {2, 3});
      return {{{sorted, sample({2, 3})}, SearchAttrs{false}},
              {{sorted, Tensor::from<double>({1, 1.5, 2}, {3})}, SearchAttrs{true}},
              {{rows, sample({2, 4}, 1)}, SearchAttrs{false}}};
    },
    .formula = "how many boundaries lie before each value",
};

constexpr OpDef kBincount{
    .name = "bincount",
    .inputs = "x, weights?",
    .attrs = attrs_of<BincountAttrs>,
    .dtypes = kInts,
    .cpu = kernel::cpu::bincount,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample_ints({9}, 0, 5), Tensor{}}, BincountAttrs{0}},
              {{sample_ints({9}, 0, 5), sample({9})}, BincountAttrs{8}}};
    },
    .formula = "how often each integer occurs",
};

}  // namespace

Rows sort_rows() {
  static constexpr std::array rows{&kSort, &kTopk, &kUnique, &kSearchsorted, &kBincount};
  return rows;
}

}  // namespace op

ValuesIndices sort(const Tensor& x, int64_t dim, bool descending) {
  auto [values, indices] = op::call_many<2>(op::kSort, op::SortAttrs{dim, descending}, x);
  return {std::move(values), std::move(indices)};
}
Tensor argsort(const Tensor& x, int64_t dim, bool descending) {
  op::need_defined("argsort", "x", x);
  return sort(x, dim, descending).indices;
}

ValuesIndices topk(const Tensor& x, int64_t k, int64_t dim, bool largest) {
  auto [values, indices] = op::call_many<2>(op::kTopk, op::TopkAttrs{k, dim, largest}, x);
  return {std::move(values), std::move(indices)};
}

Unique unique(const Tensor& x, bool return_inverse, bool return_counts) {
  auto [values, inverse, counts] = op::call_many<3>(op::kUnique, op::UniqueAttrs{return_inverse, return_counts}, x);
  return {std::move(values), std::move(inverse), std::move(counts)};
}

Tensor searchsorted(const Tensor& boundaries, const Tensor& values, bool right) {
  op::need_defined("searchsorted", "boundaries", boundaries);
  op::need_defined("searchsorted", "values", values);
  const DType dtype = promote(boundaries.dtype(), values.dtype());
  return op::call(op::kSearchsorted, op::SearchAttrs{right}, to(boundaries, dtype), to(values, dtype));
}

Tensor bincount(const Tensor& x, const Tensor& weights, int64_t minlength) {
  op::need_defined("bincount", "x", x);
  CHORALE_CHECK(x.dims() == 1, "[bincount] counts the elements of a vector, not of shape ", x.sizes());
  CHORALE_CHECK(!weights || weights.sizes() == x.sizes(), "[bincount] x has shape ", x.sizes(), " but weights have ",
                weights ? weights.sizes() : Shape{});
  CHORALE_CHECK(minlength >= 0, "[bincount] minlength is ", minlength);
  return op::call(op::kBincount, op::BincountAttrs{minlength}, x, weights);
}

}  // namespace chorale
