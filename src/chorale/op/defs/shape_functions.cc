// The functions of op/shape.h.
#include <algorithm>

#include "chorale/kernel/around_dim.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/index.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/reduce.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using namespace op;  // NOLINT(google-build-using-namespace): rows and attributes

std::span<const Tensor> span_of(std::initializer_list<Tensor> xs) { return {xs.begin(), xs.size()}; }

}  // namespace

Tensor cat(std::span<const Tensor> xs, int64_t dim) { return call_list(kCat, DimAttrs{dim}, xs); }
Tensor cat(std::initializer_list<Tensor> xs, int64_t dim) { return cat(span_of(xs), dim); }
Tensor stack(std::span<const Tensor> xs, int64_t dim) { return call_list(kStack, DimAttrs{dim}, xs); }
Tensor stack(std::initializer_list<Tensor> xs, int64_t dim) { return stack(span_of(xs), dim); }

Tensor repeat(const Tensor& x, const IntList& repeats) {
  op::need_defined("repeat", "x", x);
  CHORALE_CHECK(repeats.size() >= x.sizes().size(), "[repeat] shape ", x.sizes(), " needs at least ", x.dims(),
                " repeats, got ", repeats.shape(), "; use tile");
  for (int64_t count : repeats) {
    CHORALE_CHECK(count >= 0, "[repeat] a repeat of ", count, " in ", repeats.shape(), " is negative");
  }
  Shape sizes(repeats.size() - x.sizes().size(), 1);
  sizes.append(x.sizes().begin(), x.sizes().end());
  Tensor result = reshape(x, sizes);
  if (std::all_of(repeats.begin(), repeats.end(), [](int64_t count) { return count == 1; })) return clone(result);
  // One dimension after the other, the last first: what is copied more than once is small.
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (repeats[dim] == 1) continue;
    const kernel::Around parts = kernel::around(sizes, static_cast<int64_t>(dim));
    const int64_t block = parts.length * parts.inner;
    sizes[dim] *= repeats[dim];
    result = reshape(expand(reshape(result, {parts.outer, 1, block}), {parts.outer, repeats[dim], block}), sizes);
  }
  return result;
}

Tensor tile(const Tensor& x, const IntList& repeats) {
  op::need_defined("tile", "x", x);
  IntList all;
  for (size_t i = repeats.size(); i < x.sizes().size(); ++i) all.values[all.count++] = 1;
  for (int64_t count : repeats) all.values[all.count++] = count;
  return repeat(x, all);
}

Tensor repeat_interleave(const Tensor& x, int64_t repeats, std::optional<int64_t> dim) {
  op::need_defined("repeat_interleave", "x", x);
  CHORALE_CHECK(repeats >= 0, "[repeat_interleave] ", repeats, " repeats are negative");
  if (!dim || x.dims() == 0) return repeat_interleave(reshape(x, {x.elems()}), repeats, 0);
  const auto at = static_cast<size_t>(normalize_dim("repeat_interleave", *dim, x.dims()));
  const kernel::Around parts = kernel::around(x.sizes(), static_cast<int64_t>(at));
  Shape sizes = x.sizes();
  sizes[at] *= repeats;
  const Tensor rows = reshape(x, {parts.outer * parts.length, 1, parts.inner});
  const Tensor result = reshape(expand(rows, {-1, repeats, -1}), sizes);
  return repeats == 1 ? clone(result) : result;
}

Tensor repeat_interleave(const Tensor& x, const Tensor& repeats, std::optional<int64_t> dim) {
  op::need_defined("repeat_interleave", "x", x);
  op::need_defined("repeat_interleave", "repeats", repeats);
  if (!dim || x.dims() == 0) return repeat_interleave(flatten(x), repeats, 0);
  const int64_t at = normalize_dim("repeat_interleave", *dim, x.dims());
  const int64_t size = x.size(at);
  CHORALE_CHECK(repeats.dims() <= 1 && (repeats.elems() == 1 || repeats.elems() == size),
                "[repeat_interleave] repeats of shape ", repeats.sizes(), " do not fit dimension ", at, " of size ",
                size);
  const Tensor counts =
      repeats.elems() == size && repeats.dims() == 1 ? repeats : expand(reshape(repeats, {1}), {size});
  return index_select(x, at, call(kRepeatInterleave, {}, counts));
}

Tensor pad(const Tensor& x, const IntList& pads, PadMode mode, Scalar value) {
  return call(kPad, PadAttrs{pads, mode, value}, x);
}

Tensor roll(const Tensor& x, const IntList& shifts, const IntList& dims) {
  op::need_defined("roll", "x", x);
  if (dims.empty()) {
    CHORALE_CHECK(shifts.size() == 1, "[roll] without dimensions there is one shift, not ", shifts.shape());
    return reshape(roll(reshape(x, {x.elems()}), shifts, 0), x.sizes());
  }
  CHORALE_CHECK(shifts.size() == dims.size(), "[roll] ", shifts.size(), " shifts ", shifts.shape(), " but ",
                dims.size(), " dimensions ", dims.shape());
  Tensor result = x;
  for (size_t i = 0; i < dims.size(); ++i) result = call(kRoll, RollAttrs{dims[i], shifts[i]}, result);
  return result;
}

Tensor tril(const Tensor& x, int64_t diagonal) { return call(kTril, TriangleAttrs{diagonal}, x); }
Tensor triu(const Tensor& x, int64_t diagonal) { return call(kTriu, TriangleAttrs{diagonal}, x); }

std::vector<Tensor> meshgrid(std::span<const Tensor> xs, Indexing indexing) {
  CHORALE_CHECK(xs.size() <= kMaxDims, "[meshgrid] takes at most ", kMaxDims, " vectors, not ", xs.size());
  const bool swap = indexing == Indexing::kXY && xs.size() >= 2;
  Shape sizes;
  for (const Tensor& x : xs) {
    op::need_defined("meshgrid", "xs", x);
    CHORALE_CHECK(x.dims() <= 1, "[meshgrid] takes vectors, found shape ", x.sizes());
    sizes.push_back(x.elems());
  }
  if (swap) std::swap(sizes[0], sizes[1]);
  std::vector<Tensor> grids;
  for (size_t i = 0; i < xs.size(); ++i) {
    const size_t dim = swap && i < 2 ? 1 - i : i;
    Shape line(xs.size(), 1);
    line[dim] = sizes[dim];
    grids.push_back(expand(reshape(xs[i], line), sizes));
  }
  return grids;
}
std::vector<Tensor> meshgrid(std::initializer_list<Tensor> xs, Indexing indexing) {
  return meshgrid(span_of(xs), indexing);
}

Tensor one_hot(const Tensor& index, int64_t classes) {
  op::need_defined("one_hot", "index", index);
  if (classes == -1) {
    CHORALE_CHECK(index.elems() > 0, "[one_hot] without any index the number of classes must be given");
    classes = max(index).item<int64_t>() + 1;
    CHORALE_CHECK(classes > 0, "[one_hot] class ", classes - 1, " is negative");
  }
  return call(kOneHot, OneHotAttrs{classes}, index);
}

}  // namespace chorale
