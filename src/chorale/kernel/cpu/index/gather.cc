// Gather and scatter: an index per element. A walk goes over the elements of the index; the tensor that is indexed
// takes part with stride 0 along the dimension, and the index says how far to go from there.
#include <algorithm>
#include <atomic>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/index/checked_indices.h"
#include "chorale/kernel/cpu/index/index.h"
#include "chorale/kernel/cpu/index/modified_copy.h"
#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/index_attrs.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kGatherGrain = 1 << 14;  // elements

template <class T>
const T* advance(const T* at, int64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(at) + bytes);
}

// A tensor seen under the index's sizes; along the indexed dimension it stands still.
Tensor under_index(const Tensor& x, const Shape& sizes, size_t dim) {
  Strides strides = x.strides();
  strides[dim] = 0;
  return x.view_as(sizes, strides, x.offset());
}

Tensor narrowed(const Tensor& x, size_t dim, int64_t begin, int64_t end) {
  Shape sizes = x.sizes();
  sizes[dim] = end - begin;
  return x.view_as(sizes, x.strides(), x.offset() + begin * x.strides()[dim]);
}

// A scalar takes part as a vector of one element.
Tensor at_least_vector(const Tensor& x) { return x.dims() > 0 ? x : x.view_as({1}, {1}, x.offset()); }

struct Line {
  size_t dim;
  Tensor index;  // contiguous, in range
};

// The dimension, and the index checked against the size of x along it.
Line line_of(const char* op, const Tensor& x, int64_t dim, const Tensor& index) {
  const int64_t at = normalize_dim(op, dim, x.dims());
  const int64_t bound = x.dims() > 0 ? x.sizes()[static_cast<size_t>(at)] : 1;
  return {static_cast<size_t>(at), at_least_vector(checked_indices(op, index, bound, at))};
}

// For every element of the index, in its order: f(place in `tensor`, pointer into `list`, which may be absent). Threads
// share out a dimension other than the indexed one, so that each place is visited by one of them.
template <class T, class F>
void visit_places(const Line& line, const Tensor& tensor, const Tensor& list, F&& f) {
  const Shape& sizes = line.index.sizes();
  if (line.index.elems() == 0) return;
  size_t shared = line.dim;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (d != line.dim && (shared == line.dim || sizes[d] > sizes[shared])) shared = d;
  }
  const int64_t step = tensor.strides()[line.dim];
  const auto visit = [&](const Tensor& index, const Tensor& places, const Tensor& values) {
    const Tensor in[] = {under_index(places, index.sizes(), line.dim), values.defined() ? values : index};
    const vec::StridedView views[] = {strided(in[0]), strided(in[1])};
    const vec::StridedSpace space(strided(index), views);
    const int64_t index_step = space[0].inner_stride(space.dims()), place_step = space[1].inner_stride(space.dims());
    const int64_t value_step = space[2].inner_stride(space.dims());
    const bool side_by_side = index_step == sizeof(int64_t) && value_step == sizeof(T);
    space.for_each_row(0, space.elems(), [&](std::byte* const* data, int64_t n) {
      const auto* at = reinterpret_cast<const int64_t*>(data[0]);
      const auto* value = reinterpret_cast<const T*>(data[2]);
      std::byte* place = data[1];
      if (side_by_side) {
        for (int64_t k = 0; k < n; ++k, place += place_step) f(reinterpret_cast<T*>(place)[at[k] * step], value + k);
        return;
      }
      for (int64_t k = 0; k < n; ++k, place += place_step) {
        f(reinterpret_cast<T*>(place)[*at * step], value);
        at = advance(at, index_step);
        value = advance(value, value_step);
      }
    });
  };
  const Tensor values = list.defined() ? list.view_as(sizes, list.strides(), list.offset()) : list;
  if (shared == line.dim) return visit(line.index, tensor, values);
  parallel_for(sizes[shared], std::max<int64_t>(1, kGatherGrain / (line.index.elems() / sizes[shared])),
               [&](int64_t begin, int64_t end) {
                 visit(narrowed(line.index, shared, begin, end), narrowed(tensor, shared, begin, end),
                       values.defined() ? narrowed(values, shared, begin, end) : values);
               });
}

void add_places(const Line& line, const Tensor& work, const Tensor& list) {
  visit_dtype(work.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_places<T>(line, at_least_vector(work), at_least_vector(list),
                    [](T& place, const T* value) { place = from_sum<T>(to_sum(place) + to_sum(*value)); });
  });
}

// False where an index is out of range. Reads no memory through such a one.
template <class Unit>
bool pick_from_rows(const Unit* row, int64_t length, const int64_t* at, int64_t picked, int64_t rows, Unit* to) {
  bool all_fit = true;
  for (int64_t i = 0; i < rows; ++i, row += length) {
    for (int64_t k = 0; k < picked; ++k, ++at, ++to) {
      auto place = static_cast<uint64_t>(*at);
      if (place >= static_cast<uint64_t>(length)) {
        all_fit = false;
        place = 0;
      }
      *to = row[place];
    }
  }
  return all_fit;
}

// The usual case, picking from rows: x and the result are contiguous and differ in the length of their rows only. False
// where it is another one, or where an index is out of range. A walk over any strides would cost more than a short row,
// and so would looking at the indices before.
bool gather_rows(const Tensor& x, size_t dim, const Tensor& index, const Tensor& out) {
  const Shape &from = x.sizes(), &sizes = out.sizes();
  if (dim + 1 != sizes.size() || !x.is_contiguous() || !out.is_contiguous() || x.elems() == 0) return false;
  if (!std::equal(from.begin(), from.end() - 1, sizes.begin())) return false;
  const int64_t length = from.back(), picked = sizes.back();
  const Tensor list = contiguous(index, DType::kI64);
  const int64_t* indices = list.data<const int64_t>();
  std::atomic<bool> any_beyond = false;
  vec::visit_bytes(out.elem_bytes(), [&](auto tag) {
    using Unit = typename decltype(tag)::type;
    const auto* rows = static_cast<const Unit*>(x.raw());
    auto* results = static_cast<Unit*>(out.raw());
    parallel_for(out.elems() / picked, std::max<int64_t>(1, kGatherGrain / picked), [&](int64_t begin, int64_t end) {
      if (!pick_from_rows(rows + begin * length, length, indices + begin * picked, picked, end - begin,
                          results + begin * picked))
        any_beyond = true;
    });
  });
  return !any_beyond;
}

}  // namespace

void gather(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const int64_t dim = args.attrs.get<DimAttrs>().dim;
  const Tensor x = at_least_vector(args.in[0]), result = at_least_vector(out);
  const auto along = static_cast<size_t>(normalize_dim("gather", dim, x.dims()));
  if (out.elems() > 0 && gather_rows(x, along, args.in[1], result)) return;
  const Line line = line_of("gather", args.in[0], dim, args.in[1]);
  if (out.elems() == 0) return;
  const int64_t step = x.strides()[line.dim];
  const Tensor in[] = {line.index, under_index(x, line.index.sizes(), line.dim)};
  const vec::StridedView views[] = {strided(in[0]), strided(in[1])};
  const vec::StridedSpace space(strided(result), views);
  vec::visit_bytes(out.elem_bytes(), [&](auto tag) {
    using Unit = typename decltype(tag)::type;
    const int64_t index_step = space[1].inner_stride(space.dims()), x_step = space[2].inner_stride(space.dims());
    parallel_for(space.elems(), kGatherGrain, [&](int64_t begin, int64_t end) {
      space.for_each_row(begin, end, [&](std::byte* const* data, int64_t n) {
        auto* to = reinterpret_cast<Unit*>(data[0]);  // the result is contiguous
        const auto* at = reinterpret_cast<const int64_t*>(data[1]);
        const std::byte* from = data[2];
        if (x_step == 0 && index_step == sizeof(int64_t)) {  // along the last dimension: one row, picked from
          const auto* row = reinterpret_cast<const Unit*>(from);
          for (int64_t k = 0; k < n; ++k) to[k] = row[at[k] * step];
          return;
        }
        for (int64_t k = 0; k < n; ++k, from += x_step) {
          to[k] = reinterpret_cast<const Unit*>(from)[*at * step];
          at = advance(at, index_step);
        }
      });
    });
  });
}

void gather_backward(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const Line line = line_of("gather", out, args.attrs.get<DimBackwardAttrs>().dim, args.in[1]);
  const DType compute = compute_of(out.dtype());
  const Tensor work = compute == out.dtype() ? out : Tensor::empty(out.sizes(), compute);
  zero_bytes(work.raw(), work.elems() * static_cast<int64_t>(work.elem_bytes()));
  add_places(line, work, contiguous(args.in[0], compute));
  if (!work.is(out)) copy_into(work, out);
}

void scatter(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const Line line = line_of("scatter", x, args.attrs.get<DimAttrs>().dim, apart(args.in[1], out));
  const Tensor list = at_least_vector(apart(args.in[2], out));
  modify(x, out, x.dtype(), [&](const Tensor& work) {
    vec::visit_bytes(work.elem_bytes(), [&](auto tag) {
      using Unit = typename decltype(tag)::type;
      visit_places<Unit>(line, at_least_vector(work), list, [](Unit& place, const Unit* value) { place = *value; });
    });
  });
}

void scatter_fill(const KernelArgs& args) {
  const auto& a = args.attrs.get<FillAttrs>();
  const Tensor &x = args.in[0], &out = args.out[0];
  const Line line = line_of("scatter", x, a.dim, apart(args.in[1], out));
  modify(x, out, x.dtype(), [&](const Tensor& work) {
    visit_dtype(work.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T value = a.value.to<T>();
      visit_places<T>(line, at_least_vector(work), {}, [&](T& place, const T*) { place = value; });
    });
  });
}

void scatter_add(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const Line line = line_of("scatter_add", x, args.attrs.get<DimAttrs>().dim, apart(args.in[1], out));
  const DType compute = compute_of(x.dtype());
  const Tensor list = contiguous(apart(args.in[2], out), compute);
  modify(x, out, compute, [&](const Tensor& work) { add_places(line, work, list); });
}

}  // namespace chorale::kernel::cpu
