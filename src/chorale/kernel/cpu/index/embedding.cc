#include "chorale/kernel/cpu/index/embedding.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/index/checked_indices.h"
#include "chorale/kernel/cpu/index/indexed_runs.h"
#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/index_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// Gradients of tables are summed in f32 or f64 and written to `out` at the end. Threads share out columns, so that each
// sum is made by one of them in the order of the indices.
template <class F>
void sum_into_table(const Tensor& out, F&& add_columns) {
  const DType compute = compute_of(out.dtype());
  const Tensor work = compute == out.dtype() ? out : Tensor::empty(out.sizes(), compute);
  zero_bytes(work.raw(), work.elems() * static_cast<int64_t>(work.elem_bytes()));
  if (compute == DType::kF64) {
    add_columns(work.data<double>());
  } else {
    add_columns(work.data<float>());
  }
  if (!work.is(out)) copy_into(work, out);
}

// Calls f(begin, end) with ranges of columns, for `rows` rows of work each.
template <class F>
void share_columns(int64_t columns, int64_t rows, F&& f) {
  constexpr int64_t kCacheLines = 64;  // of at least four cache lines each
  parallel_for(columns, std::max(kCacheLines, items_grain(rows * 4)), f);
}

template <class T>
void add_row(const T* from, T* to, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) to[j] += from[j];
}
template <class T>
void add_row(T factor, const T* from, T* to, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) to[j] += factor * from[j];
}

Tensor rows_of(const char* op, const Tensor& indices, int64_t rows) { return checked_indices(op, indices, rows, 0); }

// The indices of every bag: [starts[b], starts[b + 1]).
std::vector<int64_t> bag_starts(const Tensor& offsets, int64_t count, bool last_offset) {
  const Tensor list = contiguous(offsets, DType::kI64);
  const auto values = list.span<const int64_t>();
  std::vector<int64_t> starts(values.begin(), values.end());
  if (!last_offset) starts.push_back(count);
  CHORALE_CHECK(!starts.empty() && starts[0] == 0, "[embedding_bag] offsets must begin with 0",
                starts.empty() ? " and there are none" : concat(", not ", starts[0]));
  for (size_t b = 0; b + 1 < starts.size(); ++b) {
    CHORALE_CHECK(starts[b] <= starts[b + 1] && starts[b + 1] <= count, "[embedding_bag] offset ", starts[b + 1],
                  " at position ", b + 1, " is out of range: it must lie between the one before, ", starts[b],
                  ", and the ", count, " indices");
  }
  CHORALE_CHECK(starts.back() == count, "[embedding_bag] the last offset is ", starts.back(), ", but there are ", count,
                " indices");
  return starts;
}

struct Bags {
  Tensor indices;
  std::vector<int64_t> starts;
  int64_t padding;

  Bags(const Tensor& list, const Tensor& offsets, int64_t rows, int64_t padding_row, bool last_offset)
      : indices(rows_of("embedding_bag", list, rows)),
        starts(bag_starts(offsets, list.elems(), last_offset)),
        padding(padding_row) {}

  int64_t count() const { return static_cast<int64_t>(starts.size()) - 1; }
  // Calls f(position, row) for what is in a bag; returns how many there were.
  template <class F>
  int64_t for_each(int64_t bag, F&& f) const {
    const auto* rows = indices.data<const int64_t>();
    int64_t found = 0;
    for (int64_t i = starts[static_cast<size_t>(bag)]; i < starts[static_cast<size_t>(bag) + 1]; ++i) {
      if (rows[i] == padding) continue;
      f(i, rows[i]);
      ++found;
    }
    return found;
  }
  int64_t size(int64_t bag) const {
    return for_each(bag, [](int64_t, int64_t) {});
  }
};

template <class T>
void sum_bags(const Bags& bags, BagMode mode, const T* table, const Sum<T>* weights, int64_t columns, T* to) {
  parallel_for(bags.count(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Sum<T>> sums(static_cast<size_t>(columns));
    for (int64_t bag = begin; bag < end; ++bag) {
      std::fill(sums.begin(), sums.end(), Sum<T>{});
      const int64_t found = bags.for_each(bag, [&](int64_t i, int64_t row) {
        const T* from = table + row * columns;
        const Sum<T> weight = weights ? weights[i] : Sum<T>{1};
        for (int64_t j = 0; j < columns; ++j) sums[static_cast<size_t>(j)] += weight * to_sum(from[j]);
      });
      const Sum<T> divisor = mode == BagMode::kMean ? static_cast<Sum<T>>(std::max<int64_t>(found, 1)) : Sum<T>{1};
      for (int64_t j = 0; j < columns; ++j) to[bag * columns + j] = from_sum<T>(sums[static_cast<size_t>(j)] / divisor);
    }
  });
}

// `picked` gets the row that each largest element came from; -1 for an empty bag.
template <class T>
void max_bags(const Bags& bags, const T* table, int64_t columns, T* to, int64_t* picked) {
  parallel_for(bags.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t bag = begin; bag < end; ++bag) {
      T* best = to + bag * columns;
      int64_t* from_row = picked + bag * columns;
      bool empty = true;
      bags.for_each(bag, [&](int64_t, int64_t row) {
        const T* from = table + row * columns;
        if (empty) {
          std::copy_n(from, columns, best);
          std::fill_n(from_row, columns, row);
          empty = false;
          return;
        }
        for (int64_t j = 0; j < columns; ++j) {
          const bool larger = to_sum(from[j]) > to_sum(best[j]);
          best[j] = larger ? from[j] : best[j];
          from_row[j] = larger ? row : from_row[j];
        }
      });
      if (!empty) continue;
      std::fill_n(best, columns, T{});
      std::fill_n(from_row, columns, int64_t{-1});
    }
  });
}

template <class F>
void visit_floats(DType dtype, F&& f) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_floating(dtype_of<T>)) f(tag);
  });
}

}  // namespace

namespace {
// Rows of a part of a table, and zeros for those of other parts.
void embedding_of_part(const Tensor& table, const Tensor& indices, int64_t first, const Tensor& out) {
  const Tensor part = contiguous(table);
  const int64_t bytes = table.size(1) * static_cast<int64_t>(table.elem_bytes());
  const auto rows = indices.span<const int64_t>();
  parallel_for(indices.elems(), items_grain(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)] - first;
      std::byte* to = static_cast<std::byte*>(out.raw()) + i * bytes;
      if (row >= 0 && row < table.size(0)) {
        std::copy_n(static_cast<const std::byte*>(part.raw()) + row * bytes, bytes, to);
      } else {
        std::fill_n(to, bytes, std::byte{0});
      }
    }
  });
}
}  // namespace

void embedding(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingAttrs>();
  const Tensor &table = args.in[0], &out = args.out[0];
  if (a.total > 0) return embedding_of_part(table, rows_of("embedding", args.in[1], a.total), a.first, out);
  const Tensor indices = rows_of("embedding", args.in[1], table.size(0));
  const Picks picks(Around{1, table.size(0), table.size(1)}, indices);
  picks.take(contiguous(table).raw(), out.raw(), out.elem_bytes());
}

void embedding_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBackwardAttrs>();
  const Tensor& out = args.out[0];
  const int64_t columns = out.size(1);
  const Tensor indices = rows_of("embedding", args.in[1], a.total > 0 ? a.total : a.rows);
  const auto rows = indices.span<const int64_t>();
  const Tensor dy = contiguous(args.in[0], compute_of(out.dtype()));
  sum_into_table(out, [&]<class T>(T* table) {
    const T* from = dy.data<T>();
    share_columns(columns, indices.elems(), [&](int64_t begin, int64_t end) {
      for (size_t i = 0; i < rows.size(); ++i) {
        const int64_t row = rows[i] - a.first;
        if (rows[i] == a.padding || row < 0 || row >= a.rows) continue;
        add_row(from + static_cast<int64_t>(i) * columns, table + row * columns, begin, end);
      }
    });
  });
}

void embedding_bag(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  const Tensor table = contiguous(args.in[0]);
  const Tensor& out = args.out[0];
  const int64_t columns = table.size(1);
  const Bags bags(args.in[1], args.in[2], table.size(0), a.padding, a.last_offset);
  const Tensor weights = args.in[3].defined() ? contiguous(args.in[3], compute_of(table.dtype())) : Tensor{};
  visit_floats(table.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.mode == BagMode::kMax) {
      max_bags(bags, table.data<const T>(), columns, out.data<T>(), args.out[1].data<int64_t>());
    } else {
      sum_bags(bags, a.mode, table.data<const T>(), weights.defined() ? weights.data<Sum<T>>() : nullptr, columns,
               out.data<T>());
    }
  });
}

void embedding_bag_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagBackwardAttrs>();
  const Tensor& out = args.out[0];
  const int64_t columns = out.size(1);
  const DType compute = compute_of(out.dtype());
  const Tensor dy = contiguous(args.in[0], compute);
  const Bags bags(args.in[1], args.in[2], a.rows, a.padding, a.last_offset);
  const Tensor weights = args.in[3].defined() ? contiguous(args.in[3], compute) : Tensor{};
  const Tensor picked = args.in[4].defined() ? contiguous(args.in[4]) : Tensor{};
  sum_into_table(out, [&]<class T>(T* table) {
    const T* from = dy.data<T>();
    const T* factors = weights.defined() ? weights.data<const T>() : nullptr;
    share_columns(columns, bags.indices.elems(), [&](int64_t begin, int64_t end) {
      for (int64_t bag = 0; bag < bags.count(); ++bag) {
        const T* row_gradient = from + bag * columns;
        if (a.mode == BagMode::kMax) {
          const auto* rows = picked.data<const int64_t>() + bag * columns;
          for (int64_t j = begin; j < end; ++j) {
            if (rows[j] >= 0) table[rows[j] * columns + j] += row_gradient[j];
          }
          continue;
        }
        const T share = a.mode == BagMode::kMean ? T{1} / static_cast<T>(std::max<int64_t>(bags.size(bag), 1)) : T{1};
        bags.for_each(bag, [&](int64_t i, int64_t row) {
          add_row(factors ? factors[i] : share, row_gradient, table + row * columns, begin, end);
        });
      }
    });
  });
}

void embedding_bag_weights_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<EmbeddingBagAttrs>();
  const Tensor dy = contiguous(args.in[0]), table = contiguous(args.in[1], dy.dtype());
  const Tensor& out = args.out[0];
  const int64_t columns = table.size(1);
  const Bags bags(args.in[2], args.in[3], table.size(0), a.padding, a.last_offset);
  zero_bytes(out.raw(), out.elems() * static_cast<int64_t>(out.elem_bytes()));
  visit_floats(dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = out.data<T>();
    parallel_for(bags.count(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t bag = begin; bag < end; ++bag) {
        bags.for_each(bag, [&](int64_t i, int64_t row) {
          const T *gradient = dy.data<const T>() + bag * columns, *from = table.data<const T>() + row * columns;
          Sum<T> dot{};
          for (int64_t j = 0; j < columns; ++j) dot += to_sum(gradient[j]) * to_sum(from[j]);
          to[i] = from_sum<T>(dot);
        });
      }
    });
  });
}

}  // namespace chorale::kernel::cpu
