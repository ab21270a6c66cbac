#include "chorale/kernel/cpu/picks.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/indices.h"
#include "chorale/kernel/index_layout.h"

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

}  // namespace

Picks::Picks(const Blocks& blocks, std::span<const int64_t> indices)
    : outer_(blocks.outer),
      outer_step_(blocks.length * blocks.inner),
      count_(static_cast<int64_t>(indices.size())),
      run_(blocks.inner),
      offsets_(indices.size()) {
  std::transform(indices.begin(), indices.end(), offsets_.begin(), [&](int64_t i) { return i * blocks.inner; });
}

Picks::Picks(const char* op, const Shape& x, std::span<const Tensor> indices) {
  const IndexLayout layout = index_layout(op, x, indices);
  const Strides strides = contiguous_strides(x);
  count_ = count_elems(layout.picked);
  offsets_.assign(static_cast<size_t>(count_), 0);
  for (size_t d = 0; d < indices.size(); ++d) {
    if (!indices[d].defined()) continue;
    const Tensor& index = indices[d];
    const Tensor checked = checked_indices(op, index, x[d], concat("dimension ", d), Negative::kFromEnd);
    // Broadcast by hand: the checked indices are contiguous.
    const Strides steps = broadcast_strides(checked.sizes(), checked.strides(), layout.picked);
    const auto* from = checked.data<const int64_t>();
    Shape at(layout.picked.size(), 0);
    int64_t place = 0;
    for (int64_t& offset : offsets_) {
      offset += from[place] * strides[d];
      for (size_t k = at.size(); k-- > 0;) {
        place += steps[k];
        if (++at[k] < layout.picked[k]) break;
        place -= steps[k] * layout.picked[k];
        at[k] = 0;
      }
    }
  }
  const std::span<const int64_t> sizes(x.data(), x.size());
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
    return visit_bytes(elem, [&](auto tag) {
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
