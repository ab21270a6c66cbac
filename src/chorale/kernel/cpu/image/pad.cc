#include "chorale/kernel/cpu/image/pad.h"

#include <algorithm>
#include <vector>

#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/shape_attrs.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kOutside = -1;  // no source: the constant

// One padded dimension.
struct Side {
  int64_t size;                  // unpadded
  int64_t before;                // negative: cropped
  std::vector<int64_t> sources;  // for each padded index, the unpadded one it is copied from, or kOutside

  int64_t padded() const { return static_cast<int64_t>(sources.size()); }
  // The padded indices that are copied one to one.
  int64_t middle_begin() const { return std::clamp<int64_t>(before, 0, padded()); }
  int64_t middle_end() const { return std::clamp<int64_t>(before + size, middle_begin(), padded()); }
};

int64_t source_of(int64_t i, int64_t size, PadMode mode) {
  if (i >= 0 && i < size) return i;
  switch (mode) {
    case PadMode::kConstant:
      return kOutside;
    case PadMode::kReflect:
      return i < 0 ? -i : 2 * (size - 1) - i;
    case PadMode::kReplicate:
      return i < 0 ? 0 : size - 1;
  }
  return kOutside;
}

// Sizes as [outer, the padded dimensions, unit]: dimensions before the first padded one and behind the last are not
// cut.
struct Plan {
  int64_t outer = 1;
  int64_t unit = 1;
  std::vector<Side> sides;
};

Plan make_plan(const Shape& sizes, const PadAttrs& attrs) {
  Plan plan;
  const size_t dims = sizes.size();
  const size_t listed = attrs.pads.size() / 2;
  for (size_t dim = 0; dim < dims; ++dim) {
    const size_t from_end = dims - 1 - dim;
    const int64_t before = from_end < listed ? attrs.pads[2 * from_end] : 0;
    const int64_t after = from_end < listed ? attrs.pads[2 * from_end + 1] : 0;
    if (before == 0 && after == 0 && plan.sides.empty()) {
      plan.outer *= sizes[dim];
      continue;
    }
    Side side{sizes[dim], before, {}};
    for (int64_t i = -before; i < sizes[dim] + after; ++i) side.sources.push_back(source_of(i, sizes[dim], attrs.mode));
    plan.sides.push_back(std::move(side));
  }
  while (!plan.sides.empty() && plan.sides.back().before == 0 && plan.sides.back().padded() == plan.sides.back().size) {
    plan.unit *= plan.sides.back().size;
    plan.sides.pop_back();
  }
  // Nothing is padded at all: one dimension of whatever is left.
  if (plan.sides.empty()) plan.sides.push_back({1, 0, {0}});
  return plan;
}

// Rows are what the last padded dimension runs over: how many belong to one outer index.
int64_t padded_rows(const Plan& plan) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < plan.sides.size(); ++i) rows *= plan.sides[i].padded();
  return rows;
}

// The unpadded row that a padded row is copied from, or kOutside.
int64_t source_row(const Plan& plan, int64_t row) {
  int64_t source = 0, step = 1;
  for (size_t i = plan.sides.size() - 1; i-- > 0;) {
    const Side& side = plan.sides[i];
    const int64_t at = side.sources[static_cast<size_t>(row % side.padded())];
    if (at == kOutside) return kOutside;
    source += at * step;
    step *= side.size;
    row /= side.padded();
  }
  return source + row * step;
}

}  // namespace

void pad(const KernelArgs& args) {
  const auto& a = args.attrs.get<PadAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0]);
  const Plan plan = make_plan(x.sizes(), a);
  const Side& last = plan.sides.back();
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const int64_t unit = plan.unit, row_elems = last.padded() * unit;
  const Tensor value = Tensor::scalar(a.value, out.dtype());
  // For every padded row of the first outer index, the unpadded one it is copied from; the others repeat it.
  const int64_t outer_rows = padded_rows(plan),
                outer_sources = x.elems() / std::max<int64_t>(plan.outer * last.size * plan.unit, 1);
  std::vector<int64_t> sources(static_cast<size_t>(outer_rows));
  for (int64_t row = 0; row < outer_rows; ++row) sources[static_cast<size_t>(row)] = source_row(plan, row);
  const int64_t middle = last.middle_begin(), behind = last.middle_end();
  vec::visit_bytes(static_cast<size_t>(elem), [&](auto tag) {
    using Element = typename decltype(tag)::type;
    Element constant;
    std::memcpy(&constant, value.raw(), sizeof(constant));
    const auto* from = static_cast<const Element*>(x.raw());
    auto* to = static_cast<Element*>(out.raw());
    parallel_for(plan.outer * outer_rows, items_grain(row_elems * elem), [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; ++row) {
        Element* target = to + row * row_elems;
        const int64_t outer = row / outer_rows, source_at = sources[static_cast<size_t>(row - outer * outer_rows)];
        if (source_at == kOutside) {
          std::fill_n(target, row_elems, constant);
          continue;
        }
        const Element* source = from + (outer * outer_sources + source_at) * last.size * unit;
        const auto edge = [&](int64_t begin, int64_t until) {
          if (a.mode == PadMode::kConstant) {
            std::fill_n(target + begin * unit, (until - begin) * unit, constant);
            return;
          }
          for (int64_t i = begin; i < until; ++i) {
            std::copy_n(source + last.sources[static_cast<size_t>(i)] * unit, unit, target + i * unit);
          }
        };
        edge(0, middle);
        std::copy_n(source + (middle - last.before) * unit, (behind - middle) * unit, target + middle * unit);
        edge(behind, last.padded());
      }
    });
  });
}

void pad_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<PadAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor dy = contiguous(args.in[0]);
  const Plan plan = make_plan(out.sizes(), a);
  const Side& last = plan.sides.back();
  const int64_t row_elems = last.size * plan.unit, rows = out.elems() / row_elems;
  // For every unpadded row of the first outer index, the padded rows copied from it, in order; the others repeat it.
  const int64_t outer_rows = rows / plan.outer, outer_copies = padded_rows(plan);
  std::vector<std::vector<int64_t>> copies(static_cast<size_t>(outer_rows));
  for (int64_t row = 0; row < outer_copies; ++row) copies[static_cast<size_t>(source_row(plan, row))].push_back(row);
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = dy.data<T>();
    T* to = out.data<T>();
    parallel_for(rows, std::max<int64_t>(1, 4096 / row_elems), [&](int64_t first, int64_t end) {
      std::vector<Sum<T>> sums(static_cast<size_t>(row_elems));
      for (int64_t row = first; row < end; ++row) {
        std::fill(sums.begin(), sums.end(), Sum<T>{});
        const int64_t first_copy = row / outer_rows * outer_copies;
        for (int64_t copy : copies[static_cast<size_t>(row % outer_rows)]) {
          const T* source = from + (first_copy + copy) * last.padded() * plan.unit;
          for (int64_t i = 0; i < last.padded(); ++i) {
            Sum<T>* target = sums.data() + last.sources[static_cast<size_t>(i)] * plan.unit;
            for (int64_t j = 0; j < plan.unit; ++j) target[j] += to_sum(*source++);
          }
        }
        std::transform(sums.begin(), sums.end(), to + row * row_elems, [](Sum<T> sum) { return from_sum<T>(sum); });
      }
    });
  });
}

}  // namespace chorale::kernel::cpu
