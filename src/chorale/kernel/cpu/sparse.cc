#include "chorale/kernel/cpu/sparse.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/index/checked_indices.h"
#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/view.h"

namespace chorale::kernel::cpu {
namespace {

// The place of every entry as one number, in row-major order of the sparse dimensions.
std::vector<int64_t> places(const Tensor& indices, const Shape& sizes) {
  const auto count = static_cast<size_t>(indices.size(1));
  std::vector<int64_t> result(count, 0);
  for (int64_t d = 0; d < indices.size(0); ++d) {
    const int64_t size = sizes[static_cast<size_t>(d)];
    const Tensor row =
        indices.view_as({indices.size(1)}, {indices.stride(1)}, indices.offset() + d * indices.stride(0));
    const Tensor checked = checked_indices("coalesce", row, size, d);
    const auto list = checked.span<const int64_t>();
    for (size_t i = 0; i < count; ++i) result[i] = result[i] * size + list[i];
  }
  return result;
}

}  // namespace

void sparse_coalesce(const KernelArgs& args) {
  const Tensor values = contiguous(args.in[0]), indices = contiguous(args.in[1], DType::kI64);
  const std::vector<int64_t> place = places(indices, args.attrs.get<SizesAttrs>().sizes.shape());
  const auto count = static_cast<int64_t>(place.size());
  std::vector<int64_t> order(place.size());
  std::iota(order.begin(), order.end(), 0);
  // Equal places keep their order, which is then the order of their sum.
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return place[static_cast<size_t>(a)] < place[static_cast<size_t>(b)]; });

  const Tensor inverse = Tensor::empty({count}, DType::kI64);
  std::vector<int64_t> starts;  // in `order`, of each new place
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    if (i == 0 || place[static_cast<size_t>(order[at])] != place[static_cast<size_t>(order[at - 1])])
      starts.push_back(i);
    inverse.data<int64_t>()[order[at]] = static_cast<int64_t>(starts.size()) - 1;
  }
  const auto unique = static_cast<int64_t>(starts.size());
  starts.push_back(count);

  const Tensor merged = Tensor::empty({indices.size(0), unique}, DType::kI64);
  for (int64_t d = 0; d < indices.size(0); ++d) {
    for (int64_t i = 0; i < unique; ++i) {
      merged.data<int64_t>()[d * unique + i] =
          indices.data<int64_t>()[d * count + order[static_cast<size_t>(starts[static_cast<size_t>(i)])]];
    }
  }
  Shape sizes = values.sizes();
  sizes[0] = unique;
  const Tensor sums = Tensor::empty(sizes, values.dtype());
  const int64_t row = count > 0 ? values.elems() / count : 0;
  visit_dtype(values.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = values.data<T>();
    T* to = sums.data<T>();
    parallel_for(unique, items_grain(row * static_cast<int64_t>(sizeof(T))), [&](int64_t begin, int64_t end) {
      std::vector<Sum<T>> sum(static_cast<size_t>(row));
      for (int64_t i = begin; i < end; ++i) {
        std::fill(sum.begin(), sum.end(), Sum<T>{});
        for (int64_t k = starts[static_cast<size_t>(i)]; k < starts[static_cast<size_t>(i) + 1]; ++k) {
          const T* entry = from + order[static_cast<size_t>(k)] * row;
          for (int64_t j = 0; j < row; ++j) sum[static_cast<size_t>(j)] += to_sum(entry[j]);
        }
        std::transform(sum.begin(), sum.end(), to + i * row, [](Sum<T> total) { return from_sum<T>(total); });
      }
    });
  });
  args.out[0] = sums;
  args.out[1] = merged;
  args.out[2] = inverse;
}

}  // namespace chorale::kernel::cpu
