#include "chorale/kernel/cpu/index/indexed_runs.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/index/checked_indices.h"
#include "chorale/kernel/index_layout.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::kernel::cpu {
namespace {

// list[o][b] = tensor[o * step + offsets[b]], one element each.
template <class Unit>
void take_units(const Unit* tensor, Unit* list, int64_t outer, int64_t step, std::span<const int64_t> offsets) {
  const auto count = static_cast<int64_t>(offsets.size());
  parallel_for(outer * count, items_grain(sizeof(Unit)), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t o = at / count, until = std::min(end, (o + 1) * count);
      const Unit* block = tensor + o * step;
      const int64_t* offset = offsets.data() + (at - o * count);
      for (; at < until; ++at) list[at] = block[*offset++];
    }
  });
}

// offsets += indices * stride, with the indices (contiguous) broadcast to the shape of the picks.
void add_offsets(const Tensor& indices, const Shape& picked, int64_t stride, std::span<int64_t> offsets) {
  const auto* from = indices.data<const int64_t>();
  if (indices.sizes() == picked) {
    for (int64_t& offset : offsets) offset += *from++ * stride;
    return;
  }
  const Strides steps = broadcast_strides(indices.sizes(), indices.strides(), picked);
  Shape at(picked.size(), 0);
  int64_t place = 0;
  for (int64_t& offset : offsets) {
    offset += from[place] * stride;
    for (size_t k = at.size(); k-- > 0;) {
      place += steps[k];
      if (++at[k] < picked[k]) break;
      place -= steps[k] * picked[k];
      at[k] = 0;
    }
  }
}

}  // namespace

Picks::Picks(const Around& parts, const Tensor& indices)
    : outer_(parts.outer),
      outer_step_(parts.length * parts.inner),
      count_(indices.elems()),
      run_(parts.inner),
      offsets_(indices.span<const int64_t>()),
      indices_(indices) {
  if (run_ == 1) return;
  computed_.resize(offsets_.size());
  std::transform(offsets_.begin(), offsets_.end(), computed_.begin(), [&](int64_t i) { return i * parts.inner; });
  offsets_ = computed_;
}

Picks::Picks(const char* op, const Shape& x, std::span<const Tensor> indices) {
  const IndexLayout layout = index_layout(op, x, indices);
  const std::span<const int64_t> sizes(x.data(), x.size());
  if (layout.first == layout.last) {
    const size_t d = layout.first;
    const Around parts = around(x, static_cast<int64_t>(d));
    *this = Picks(parts, checked_indices(op, indices[d], x[d], static_cast<int64_t>(d), Negative::kFromEnd));
    return;
  }
  const Strides strides = contiguous_strides(x);
  count_ = count_elems(layout.picked);
  computed_.assign(static_cast<size_t>(count_), 0);
  for (size_t d = 0; d < indices.size(); ++d) {
    if (indices[d].defined()) {
      add_offsets(checked_indices(op, indices[d], x[d], static_cast<int64_t>(d), Negative::kFromEnd), layout.picked,
                  strides[d], computed_);
    }
  }
  offsets_ = computed_;
  run_ = count_elems(sizes.subspan(layout.last + 1));
  if (layout.aside) {
    outer_ = count_elems(sizes.first(layout.first));
    outer_step_ = count_elems(sizes.subspan(layout.first));
    return;
  }
  for (size_t d = 0; d < layout.last; ++d) {
    if (d < indices.size() && indices[d].defined()) continue;
    std::vector<int64_t> finer;
    for (int64_t piece : pieces_) {
      for (int64_t i = 0; i < x[d]; ++i) finer.push_back(piece + i * strides[d]);
    }
    pieces_ = std::move(finer);
  }
}

void Picks::take(const void* tensor, void* list, size_t elem) const {
  if (elems() == 0) return;
  if (row() == 1) {
    return vec::visit_bytes(elem, [&](auto tag) {
      using Unit = typename decltype(tag)::type;
      take_units(static_cast<const Unit*>(tensor), static_cast<Unit*>(list), outer_, outer_step_, offsets_);
    });
  }
  // Reading one place twice is no conflict, so that picks are shared out too.
  const auto bytes = static_cast<int64_t>(elem);
  const auto* from = static_cast<const std::byte*>(tensor);
  auto* to = static_cast<std::byte*>(list);
  const int64_t run = run_ * bytes;
  parallel_for(outer_ * count_, items_grain(row() * bytes), [&](int64_t begin, int64_t end) {
    std::byte* target = to + begin * row() * bytes;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pick = i / count_ * outer_step_ + offsets_[static_cast<size_t>(i % count_)];
      for (int64_t piece : pieces_) {
        std::memcpy(target, from + (pick + piece) * bytes, static_cast<size_t>(run));
        target += run;
      }
    }
  });
}

void Picks::put(const void* list, void* tensor, size_t elem) const {
  const auto bytes = static_cast<int64_t>(elem);
  for_each_run(elem, [&](int64_t list_at, int64_t tensor_at, int64_t n) {
    std::memcpy(static_cast<std::byte*>(tensor) + tensor_at * bytes,
                static_cast<const std::byte*>(list) + list_at * bytes, static_cast<size_t>(n * bytes));
  });
}

void Picks::fill(const void* value, void* tensor, size_t elem) const {
  const auto bytes = static_cast<int64_t>(elem);
  for_each_run(elem, [&](int64_t, int64_t tensor_at, int64_t n) {
    std::byte* to = static_cast<std::byte*>(tensor) + tensor_at * bytes;
    for (int64_t j = 0; j < n; ++j) std::memcpy(to + j * bytes, value, elem);
  });
}

}  // namespace chorale::kernel::cpu
