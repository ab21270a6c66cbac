#include "chorale/kernel/cuda/order.h"

#include <bit>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/order_attrs.h"

namespace chorale::cuda {
extern const std::string_view kOrderCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kOrderCu;

// The first `taken` of every line along a dimension, in order: a bitonic sort of all lines at once.
void take_in_order(const KernelArgs& args, int64_t dim, int64_t taken, bool descending) {
  const Stream stream = args.stream;
  const Tensor &values = args.out[0], &indices = args.out[1];
  if (values.elems() == 0) return;
  const Tensor x = contiguous(args.in[0], stream);
  const Around a = x.dims() == 0 ? Around{} : around(x.sizes(), normalize_dim("sort", dim, x.dims()));
  const int64_t lines = a.lines(), n = a.length;
  const auto width = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
  const int64_t count = lines * width;
  const Tensor entries = Tensor::empty({count, 2}, DType::kI64, stream.device);
  const Grid grid{.x = blocks_for(stream.device, count)};
  launch(instance(stream, kOrderCu, "make_entries", {x.dtype()}), grid, stream, x.raw(), entries.raw(), lines, n,
         a.inner, width, int64_t{descending});
  sort_pairs(entries, width, stream);
  launch(instance(stream, kOrderCu, "take_sorted", {x.dtype()}), {.x = blocks_for(stream.device, values.elems())},
         stream, x.raw(), entries.raw(), values.raw(), indices.raw(), lines, n, a.inner, width, taken);
}

}  // namespace

void sort_pairs(const Tensor& pairs, int64_t width, Stream stream) {
  const int64_t count = pairs.elems() / 2;
  const Grid grid{.x = blocks_for(stream.device, count)};
  for (int64_t run = 2; run <= width; run *= 2) {
    for (int64_t apart = run / 2; apart > 0; apart /= 2) {
      launch(instance(stream, kOrderCu, "sort_step", {}, "0"), grid, stream, pairs.raw(), count, width, run, apart);
    }
  }
}

void sort(const KernelArgs& args) {
  const auto& a = args.attrs.get<SortAttrs>();
  take_in_order(args, a.dim, args.in[0].dims() == 0 ? 1 : args.in[0].size(a.dim), a.descending);
}

void topk(const KernelArgs& args) {
  const auto& a = args.attrs.get<TopkAttrs>();
  take_in_order(args, a.dim, a.k, a.largest);
}

void searchsorted(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor lists = contiguous(args.in[0], stream), values = contiguous(args.in[1], stream);
  if (values.elems() == 0) return;
  const int64_t per_row = lists.dims() == 1 ? values.elems() : values.size(-1);
  launch(instance(stream, kOrderCu, "search_sorted", {lists.dtype()}), {.x = blocks_for(stream.device, values.elems())},
         stream, lists.raw(), values.raw(), args.out[0].raw(), values.elems(), lists.size(-1), per_row,
         int64_t{args.attrs.get<SearchAttrs>().right});
}

}  // namespace chorale::kernel::cuda
