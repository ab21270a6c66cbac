#include "chorale/kernel/cuda/index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "chorale/device/cuda/space.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/order.h"
#include "chorale/kernel/index_attrs.h"
#include "chorale/kernel/index_layout.h"
#include "chorale/kernel/shape_attrs.h"

namespace chorale::cuda {
extern const std::string_view kIndexCu, kBagsCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kBagsCu;
using chorale::cuda::kIndexCu;
using chorale::cuda::unit_in_text;

// Rows whose entries a block of order_rows puts in order (index.cu).
constexpr int64_t kRowsOfBlock = 96;

// What kernels see (index.cu).
struct Picked {
  int64_t outer = 1, length = 0, inner = 1, count = 0;
  int64_t first = 0, total = 0;
  int64_t padding = -1;
  chorale::cuda::Fault* fault = nullptr;
  int64_t row = 0;
};
struct Gathered {
  int64_t dims = 0, dim = 0, elems = 0, lines = 0, bound = 0;
  int64_t sizes[8] = {};
  int64_t x_strides[8] = {}, index_strides[8] = {}, list_strides[8] = {};
  chorale::cuda::Fault* fault = nullptr;
  int64_t row = 0;
};
using Element = std::array<std::byte, 16>;

Element element_of(Scalar number, DType dtype) {
  Element bytes{};
  const Tensor value = Tensor::scalar(number, dtype);
  std::memcpy(bytes.data(), value.raw(), size_of(dtype));
  return bytes;
}

Picked rows_along(const KernelArgs& args, const Shape& sizes, int64_t dim, int64_t count) {
  const Around a = around(sizes, normalize_dim("index", dim, static_cast<int64_t>(sizes.size())));
  return {a.outer, a.length, a.inner, count, 0, 0, -1, fault_of(args.stream.device), row_number(args)};
}

void take_picked(const KernelArgs& args, const Tensor& x, const Tensor& index, const Picked& p) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor from = contiguous(x, args.stream), list = contiguous(index, DType::kI64, args.stream);
  // Rows move in units of up to 16 bytes.
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const auto addresses = reinterpret_cast<uintptr_t>(from.raw()) | reinterpret_cast<uintptr_t>(out.raw());
  int64_t unit = 16;
  while (unit > elem && (p.inner * elem % unit != 0 || addresses % static_cast<uintptr_t>(unit) != 0)) unit /= 2;
  Picked in_units = p;
  in_units.inner = p.inner * elem / unit;
  launch(instance(args.stream, kIndexCu, "take_rows", {}, unit_in_text(static_cast<size_t>(unit))),
         {.x = blocks_for(args.stream.device, out.elems() * elem / unit)}, args.stream, from.raw(), list.raw(),
         out.raw(), in_units);
}

// x[picked] += alpha * list. `x` is contiguous and of a dtype that sums are made in.
void add_picked(const KernelArgs& args, const Tensor& x, const Tensor& index, const Tensor& list_any, Scalar alpha,
                const Picked& p) {
  if (x.elems() == 0 || p.count == 0) return;
  const Stream stream = args.stream;
  const Tensor indices = contiguous(index, DType::kI64, stream), list = contiguous(list_any, stream);
  const Tensor counts = Tensor::empty({p.length}, DType::kI32, stream.device);
  const Tensor starts = Tensor::empty({p.length}, DType::kI64, stream.device);
  const Tensor places = Tensor::empty({p.count}, DType::kI64, stream.device);
  const Tensor taken = Tensor::empty({1}, DType::kI64, stream.device);
  set_zero(counts, stream);
  set_zero(taken, stream);
  launch(instance(stream, kIndexCu, "count_rows", {DType::kI64}), {.x = blocks_for(stream.device, p.count)}, stream,
         indices.raw(), counts.raw(), p);
  launch(instance(stream, kIndexCu, "order_rows", {DType::kI64}),
         {.x = static_cast<unsigned>((p.length + kRowsOfBlock - 1) / kRowsOfBlock), .threads = 1024}, stream,
         indices.raw(), counts.raw(), starts.raw(), places.raw(), taken.raw(), p);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.outer * p.length, 1 << 20));
  launch(instance(stream, kIndexCu, "add_rows", {x.dtype(), list.dtype()}), {.x = blocks}, stream, x.raw(), list.raw(),
         counts.raw(), starts.raw(), places.raw(), element_of(alpha, x.dtype()), p);
}

// Zeros plus dy at the picked places, for gradients of picking.
void add_to_zero(const KernelArgs& args, const Tensor& index, const Tensor& dy, const Picked& p) {
  const Tensor& out = args.out[0];
  const DType compute = compute_of(out.dtype());
  const Tensor work =
      compute == out.dtype() && out.is_contiguous() ? out : Tensor::empty(out.sizes(), compute, out.device());
  set_zero(work, args.stream);
  add_picked(args, work, index, dy, 1, p);
  if (!work.is(out)) copy_into(work, out, args.stream);
}

// Runs body(work) on contiguous memory of `compute` with the values of x; the result ends up in out, which may be x.
template <class F>
void modify_copy(const KernelArgs& args, DType compute, F&& body) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const bool direct = out.is_contiguous() && out.dtype() == compute;
  const Tensor work = direct ? out : Tensor::empty(out.sizes(), compute, out.device());
  if (!(direct && work.raw() == x.raw())) copy_into(x, work, args.stream);
  body(work);
  if (!direct) copy_into(work, out, args.stream);
}
// x, or a copy of it where writing to `out` would change it.
Tensor apart_from(const Tensor& x, const Tensor& out, Stream stream) {
  if (!x.overlaps(out)) return x;
  Tensor copy = Tensor::empty(x.sizes(), x.dtype(), x.device());
  copy_into(x, copy, stream);
  return copy;
}

void put_picked(const KernelArgs& args, const Tensor& work, const Tensor& index, const Tensor& list, Scalar fill,
                const Picked& p) {
  if (work.elems() == 0 || p.count == 0) return;
  const Tensor indices = contiguous(index, DType::kI64, args.stream);
  const Tensor values = list.defined() ? contiguous(list, args.stream) : Tensor();
  const void* const from = values.defined() ? values.raw() : nullptr;
  const int64_t fills = values.defined() ? 0 : 1;
  launch(instance(args.stream, kIndexCu, "put_rows", {}, unit_in_text(work.elem_bytes())),
         {.x = blocks_for(args.stream.device, p.outer * p.count * p.inner)}, args.stream, work.raw(), indices.raw(),
         from, element_of(fill, work.dtype()), fills, p);
}

Tensor at_least_1d(const Tensor& x) { return x.dims() > 0 ? x : x.view_as({1}, {1}, x.offset()); }

Gathered elements_along(const KernelArgs& args, const Tensor& x, const Tensor& index, const Tensor& list, int64_t dim) {
  Gathered g;
  g.dims = index.dims();
  g.dim = normalize_dim("gather", dim, x.dims());
  g.elems = index.elems();
  const auto at = static_cast<size_t>(g.dim);
  g.lines = index.sizes()[at] == 0 ? 0 : g.elems / index.sizes()[at];
  g.bound = x.sizes()[at];
  for (size_t d = 0; d < index.sizes().size(); ++d) {
    g.sizes[d] = index.sizes()[d];
    g.x_strides[d] = x.strides()[d];
    g.index_strides[d] = index.strides()[d];
    if (list.defined()) g.list_strides[d] = list.strides()[d];
  }
  g.fault = fault_of(args.stream.device);
  g.row = row_number(args);
  return g;
}

void add_elements(const KernelArgs& args, const Tensor& work, const Tensor& index_any, const Tensor& list,
                  int64_t dim) {
  const Tensor x = at_least_1d(work), index = at_least_1d(contiguous(index_any, DType::kI64, args.stream));
  const Tensor from = at_least_1d(list);
  const Gathered g = elements_along(args, x, index, from, dim);
  if (g.lines == 0) return;
  const int64_t fills = 0;
  launch(instance(args.stream, kIndexCu, "scatter_elements", {x.dtype()}, "true"),
         {.x = blocks_for(args.stream.device, g.lines)}, args.stream, x.raw(), index.raw(), from.raw(), Element{},
         fills, g);
}

}  // namespace

void embedding(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingAttrs>();
  const Tensor& table = args.in[0];
  Picked p = rows_along(args, table.sizes(), 0, args.in[1].elems());
  p.first = a.total > 0 ? a.first : 0;
  p.total = a.total;
  take_picked(args, table, args.in[1], p);
}

void embedding_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBackwardAttrs>();
  Picked p = rows_along(args, args.out[0].sizes(), 0, args.in[1].elems());
  p.first = a.total > 0 ? a.first : 0;
  p.total = a.total;
  p.padding = a.padding;
  add_to_zero(args, args.in[1], args.in[0], p);
}

void index_select(const KernelArgs& args) {
  take_picked(args, args.in[0], args.in[1],
              rows_along(args, at_least_1d(args.in[0]).sizes(), args.attrs.get<DimAttrs>().dim, args.in[1].elems()));
}
void index_select_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<DimBackwardAttrs>();
  add_to_zero(args, args.in[1], args.in[0],
              rows_along(args, at_least_1d(args.out[0]).sizes(), a.dim, args.in[1].elems()));
}
void index_add(const KernelArgs& args) {
  const auto& a = args.attrs.get<IndexAddAttrs>();
  const Tensor list = apart_from(args.in[2], args.out[0], args.stream);
  const Picked p = rows_along(args, at_least_1d(args.in[0]).sizes(), a.dim, args.in[1].elems());
  modify_copy(args, compute_of(args.in[0].dtype()),
              [&](const Tensor& work) { add_picked(args, work, args.in[1], list, a.alpha, p); });
}
void index_copy(const KernelArgs& args) {
  const Tensor list = apart_from(args.in[2], args.out[0], args.stream);
  const Picked p =
      rows_along(args, at_least_1d(args.in[0]).sizes(), args.attrs.get<DimAttrs>().dim, args.in[1].elems());
  modify_copy(args, args.in[0].dtype(), [&](const Tensor& work) { put_picked(args, work, args.in[1], list, 0, p); });
}
void index_fill(const KernelArgs& args) {
  const auto& a = args.attrs.get<FillAttrs>();
  const Picked p = rows_along(args, at_least_1d(args.in[0]).sizes(), a.dim, args.in[1].elems());
  modify_copy(args, args.in[0].dtype(),
              [&](const Tensor& work) { put_picked(args, work, args.in[1], {}, a.value, p); });
}

void gather(const KernelArgs& args) {
  const Tensor x = at_least_1d(args.in[0]), index = at_least_1d(contiguous(args.in[1], DType::kI64, args.stream));
  const Gathered g = elements_along(args, x, index, {}, args.attrs.get<DimAttrs>().dim);
  if (g.elems == 0) return;
  launch(instance(args.stream, kIndexCu, "gather_elements", {}, unit_in_text(x.elem_bytes())),
         {.x = blocks_for(args.stream.device, g.elems)}, args.stream, x.raw(), index.raw(), args.out[0].raw(), g);
}
void gather_backward(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const DType compute = compute_of(out.dtype());
  const Tensor work = compute == out.dtype() ? out : Tensor::empty(out.sizes(), compute, out.device());
  set_zero(work, args.stream);
  add_elements(args, work, args.in[1], contiguous(args.in[0], compute, args.stream),
               args.attrs.get<DimBackwardAttrs>().dim);
  if (!work.is(out)) copy_into(work, out, args.stream);
}
void scatter_add(const KernelArgs& args) {
  const DType compute = compute_of(args.in[0].dtype());
  const Tensor list = contiguous(apart_from(args.in[2], args.out[0], args.stream), compute, args.stream);
  const Tensor index = apart_from(args.in[1], args.out[0], args.stream);
  modify_copy(args, compute,
              [&](const Tensor& work) { add_elements(args, work, index, list, args.attrs.get<DimAttrs>().dim); });
}

namespace {
void scatter_values(const KernelArgs& args, const Tensor& list, Scalar fill, int64_t dim) {
  const Tensor index =
      at_least_1d(contiguous(apart_from(args.in[1], args.out[0], args.stream), DType::kI64, args.stream));
  modify_copy(args, args.in[0].dtype(), [&](const Tensor& work) {
    const Tensor x = at_least_1d(work);
    const Gathered g = elements_along(args, x, index, list, dim);
    if (g.lines == 0) return;
    const int64_t fills = list.defined() ? 0 : 1;
    const void* const from = list.defined() ? list.raw() : nullptr;
    const std::string more = concat(unit_in_text(x.elem_bytes()), ", false");
    launch(instance(args.stream, kIndexCu, "scatter_elements", {}, more.c_str()),
           {.x = blocks_for(args.stream.device, g.lines)}, args.stream, x.raw(), index.raw(), from,
           element_of(fill, x.dtype()), fills, g);
  });
}
}  // namespace

void scatter(const KernelArgs& args) {
  scatter_values(args, at_least_1d(apart_from(args.in[2], args.out[0], args.stream)), 0,
                 args.attrs.get<DimAttrs>().dim);
}
void scatter_fill(const KernelArgs& args) {
  const auto& a = args.attrs.get<FillAttrs>();
  scatter_values(args, {}, a.value, a.dim);
}

void one_hot(const KernelArgs& args) {
  const int64_t classes = args.attrs.get<OneHotAttrs>().classes;
  const Tensor& out = args.out[0];
  set_zero(out, args.stream);
  const int64_t rows = args.in[0].elems();
  if (rows == 0 || classes == 0) return;
  const Tensor index = contiguous(args.in[0], DType::kI64, args.stream);
  const Tensor flat = out.view_as({rows, classes}, {classes, 1}, out.offset());
  const Tensor column = index.view_as({rows, 1}, {1, 1}, index.offset());
  const Gathered g = elements_along(args, flat, column, {}, 1);
  const int64_t fills = 1;
  const void* const none = nullptr;
  launch(instance(args.stream, kIndexCu, "scatter_elements", {}, "i64, false"),
         {.x = blocks_for(args.stream.device, rows)}, args.stream, flat.raw(), column.raw(), none,
         element_of(1, DType::kI64), fills, g);
}

// ---- x[i0, i1, …]

namespace {

// What kernels see (index.cu).
struct Places {
  int64_t elems = 0, dims = 0, x_dims = 0;
  int64_t sizes[8] = {};
  int64_t x_sizes[8] = {}, x_strides[8] = {};
  int64_t from[8] = {};
  const void* index[8] = {};
  int64_t steps[8][8] = {};
  chorale::cuda::Fault* fault = nullptr;
  int64_t row = 0;
};
// Places in a contiguous tensor of these sizes, and the indices that live meanwhile.
struct Picking {
  Picking(const KernelArgs& args, const char* op, const Shape& x, std::span<const Tensor> indices)
      : layout(index_layout(op, x, indices)) {
    const Strides strides = contiguous_strides(x);
    places.dims = static_cast<int64_t>(layout.result.size());
    places.x_dims = static_cast<int64_t>(x.size());
    places.elems = count_elems(layout.result);
    places.fault = fault_of(args.stream.device);
    places.row = row_number(args);
    for (size_t k = 0; k < layout.result.size(); ++k) places.sizes[k] = layout.result[k];
    // Dimensions of the result: those before the indexed ones, the picked ones, the others; or the picked ones first.
    const size_t picked_at = layout.aside ? layout.first : 0;
    size_t next = layout.aside ? 0 : layout.picked.size();
    for (size_t d = 0; d < x.size(); ++d) {
      places.x_sizes[d] = x[d];
      places.x_strides[d] = strides[d];
      if (layout.aside && d == layout.first) next += layout.picked.size();
      if (d >= indices.size() || !indices[d].defined()) {
        places.from[d] = static_cast<int64_t>(next++);
        continue;
      }
      places.from[d] = -1;
      kept.push_back(contiguous(indices[d], DType::kI64, args.stream));
      places.index[d] = kept.back().raw();
      const Strides steps = broadcast_strides(kept.back().sizes(), kept.back().strides(), layout.picked);
      for (size_t k = 0; k < steps.size(); ++k) places.steps[d][picked_at + k] = steps[k];
    }
  }
  IndexLayout layout;
  Places places;
  std::vector<Tensor> kept;
};

// work[places] += list, in the order of the list. Both are contiguous and of one dtype.
void add_at_places(const Tensor& work, const Tensor& list, const Places& places, Stream stream) {
  if (places.elems == 0) return;
  const auto width = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(places.elems)));
  const Tensor pairs = Tensor::empty({width, 2}, DType::kI64, stream.device);
  const Grid grid{.x = blocks_for(stream.device, width)};
  launch(instance(stream, kIndexCu, "name_places", {}, "0"), grid, stream, pairs.raw(), width, places);
  sort_pairs(pairs, width, stream);
  launch(instance(stream, kIndexCu, "add_places", {work.dtype()}), grid, stream, work.raw(), list.raw(), pairs.raw(),
         width);
}
// x seen in a larger shape, each element repeated, as contiguous memory.
Tensor as_list_of(const Tensor& x, const Shape& sizes, DType dtype, Stream stream) {
  return contiguous(x.view_as(sizes, broadcast_strides(x.sizes(), x.strides(), sizes), x.offset()), dtype, stream);
}

}  // namespace

void index(const KernelArgs& args) {
  const Tensor x = contiguous(args.in[0], args.stream);
  const Picking picking(args, "index", x.sizes(), args.in.subspan(1));
  if (picking.places.elems == 0) return;
  launch(instance(args.stream, kIndexCu, "take_places", {}, unit_in_text(x.elem_bytes())),
         {.x = blocks_for(args.stream.device, picking.places.elems)}, args.stream, x.raw(), args.out[0].raw(),
         picking.places);
}

void index_backward(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const DType compute = compute_of(out.dtype());
  const Picking picking(args, "index", out.sizes(), args.in.subspan(1));
  const Tensor work =
      compute == out.dtype() && out.is_contiguous() ? out : Tensor::empty(out.sizes(), compute, out.device());
  set_zero(work, args.stream);
  add_at_places(work, contiguous(args.in[0], compute, args.stream), picking.places, args.stream);
  if (!work.is(out)) copy_into(work, out, args.stream);
}

void index_put(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const bool accumulate = args.attrs.get<IndexPutAttrs>().accumulate;
  const DType compute = accumulate ? compute_of(x.dtype()) : x.dtype();
  std::vector<Tensor> apart;
  for (const Tensor& one : args.in.subspan(2)) apart.push_back(one.defined() ? apart_from(one, out, args.stream) : one);
  const Picking picking(args, "index_put", x.sizes(), apart);
  const Tensor list = as_list_of(apart_from(args.in[1], out, args.stream), picking.layout.result, compute, args.stream);
  modify_copy(args, compute, [&](const Tensor& work) {
    if (accumulate) return add_at_places(work, list, picking.places, args.stream);
    if (picking.places.elems == 0) return;
    const Tensor winners = Tensor::empty({work.elems()}, DType::kI64, out.device());
    set_zero(winners, args.stream);
    const Grid grid{.x = blocks_for(args.stream.device, picking.places.elems)};
    launch(instance(args.stream, kIndexCu, "win_places", {}, "0"), grid, args.stream, winners.raw(), picking.places);
    launch(instance(args.stream, kIndexCu, "put_places", {}, unit_in_text(work.elem_bytes())), grid, args.stream,
           work.raw(), list.raw(), winners.raw(), picking.places);
  });
}

// ---- bags of rows

namespace {

// What kernels see (bags.cu), with the lists that live meanwhile.
struct Bags {
  const void* indices = nullptr;
  const void* offsets = nullptr;
  int64_t count = 0, given = 0, bags = 0;
  int64_t rows = 0, columns = 0, padding = -1;
  chorale::cuda::Fault* fault = nullptr;
  int64_t row = 0;
};
struct BagLists {
  BagLists(const KernelArgs& args, const Tensor& list, const Tensor& starts, int64_t rows, int64_t columns,
           int64_t padding, bool last_offset)
      : indices(contiguous(list, DType::kI64, args.stream)), offsets(contiguous(starts, DType::kI64, args.stream)) {
    bags = {indices.raw(),
            offsets.raw(),
            indices.elems(),
            offsets.elems(),
            offsets.elems() - (last_offset ? 1 : 0),
            rows,
            columns,
            padding,
            fault_of(args.stream.device),
            row_number(args)};
  }
  Grid grid() const {
    return {.x = static_cast<unsigned>(std::clamp<int64_t>(bags.bags, 1, 1 << 20)),
            .threads = row_threads(std::min<int64_t>(bags.columns, 256))};
  }
  Tensor indices, offsets;
  Bags bags;
};
std::string mode_in_text(BagMode mode) { return concat(static_cast<int>(mode)); }

}  // namespace

void embedding_bag(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  const Tensor table = contiguous(args.in[0], args.stream);
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const BagLists lists(args, args.in[1], args.in[2], table.size(0), table.size(1), a.padding, a.last_offset);
  const Tensor weights =
      args.in[3].defined() ? contiguous(args.in[3], compute_of(table.dtype()), args.stream) : Tensor();
  void* const factors = weights.defined() ? weights.raw() : nullptr;
  void* const picked = a.mode == BagMode::kMax ? args.out[1].raw() : nullptr;
  launch(instance(args.stream, kBagsCu, "bag_rows", {table.dtype()}, mode_in_text(a.mode).c_str()), lists.grid(),
         args.stream, table.raw(), factors, out.raw(), picked, lists.bags);
}

void embedding_bag_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagBackwardAttrs>();
  const Stream stream = args.stream;
  const Tensor& out = args.out[0];
  const DType compute = compute_of(out.dtype());
  const int64_t columns = out.size(1);
  const Tensor dy = contiguous(args.in[0], compute, stream);
  if (a.mode == BagMode::kMax) {
    const Tensor picked = contiguous(args.in[4], DType::kI64, stream);
    const Tensor list = Tensor::empty(dy.sizes(), compute, stream.device);
    const Tensor index = Tensor::empty(dy.sizes(), DType::kI64, stream.device);
    const Tensor work = compute == out.dtype() ? out : Tensor::empty(out.sizes(), compute, out.device());
    set_zero(work, stream);
    if (dy.elems() > 0) {
      launch(instance(stream, kBagsCu, "clean_picked", {compute}), {.x = blocks_for(stream.device, dy.elems())}, stream,
             dy.raw(), picked.raw(), list.raw(), index.raw(), dy.elems());
      add_elements(args, work, index, list, 0);
    }
    if (!work.is(out)) copy_into(work, out, stream);
    return;
  }
  const BagLists lists(args, args.in[1], args.in[2], a.rows, columns, a.padding, a.last_offset);
  const Tensor weights = args.in[3].defined() ? contiguous(args.in[3], compute, stream) : Tensor();
  void* const factors = weights.defined() ? weights.raw() : nullptr;
  const Tensor list = Tensor::empty({lists.bags.count, columns}, compute, stream.device);
  if (list.elems() > 0) {
    launch(instance(stream, kBagsCu, "spread_bags", {compute}, mode_in_text(a.mode).c_str()), lists.grid(), stream,
           dy.raw(), factors, list.raw(), lists.bags);
  }
  Picked p = rows_along(args, out.sizes(), 0, lists.bags.count);
  p.padding = a.padding;
  add_to_zero(args, lists.indices, list, p);
}

void embedding_bag_weights_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  const Tensor dy = contiguous(args.in[0], args.stream), table = contiguous(args.in[1], dy.dtype(), args.stream);
  const Tensor& out = args.out[0];
  set_zero(out, args.stream);
  const BagLists lists(args, args.in[2], args.in[3], table.size(0), table.size(1), a.padding, a.last_offset);
  if (lists.bags.bags == 0 || out.elems() == 0) return;
  launch(instance(args.stream, kBagsCu, "bag_weights", {dy.dtype()}), lists.grid(), args.stream, dy.raw(), table.raw(),
         out.raw(), lists.bags);
}

}  // namespace chorale::kernel::cuda
