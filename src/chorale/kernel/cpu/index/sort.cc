#include "chorale/kernel/cpu/index/sort.h"

#include <numeric>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/index/sort_keys.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kGrainElems = 4096;

template <class F>
void visit_sortable(DType dtype, F&& f) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!is_complex(dtype_of<T>)) f(tag);
  });
}

// What sorting knows of a dtype whose elements are as wide as K: how n of them become keys, with the bits of `flip`
// turned round, and whether the largest key stands for NaN. Everything else handles bits of that width, so that it is
// compiled once for all dtypes of a width.
template <class K>
struct Keys {
  K (*make)(const void* elements, int64_t n, K flip, K* keys);  // returns the least
  bool has_nan;
};

template <class T>
Key<T> make_keys(const void* elements, int64_t n, Key<T> flip, Key<T>* keys) {
  const T* x = static_cast<const T*>(elements);
  Key<T> least = std::numeric_limits<Key<T>>::max();
  for (int64_t i = 0; i < n; ++i) {
    keys[i] = Key<T>(key_of(x[i]) ^ flip);
    least = std::min(least, keys[i]);
  }
  return least;
}

// f(keys of the dtype, an index) with indices of 32 bits where n elements allow it: they halve the memory that a sort
// moves.
template <class F>
void visit_keys(DType dtype, int64_t n, F&& f) {
  const auto with_index = [&](const auto& keys) {
    if (n <= std::numeric_limits<uint32_t>::max()) {
      f(keys, uint32_t{});
    } else {
      f(keys, int64_t{});
    }
  };
  vec::visit_bytes(size_of(dtype), [&](auto width) {
    using K = typename decltype(width)::type;
    if constexpr (std::is_integral_v<K>) {
      Keys<K> keys{};
      visit_sortable(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_same_v<Key<T>, K>) keys = {&make_keys<T>, kHasNan<T>};
      });
      with_index(keys);
    }
  });
}

// How many keys are made at once.
constexpr int64_t kBlock = 64;

// The order of n elements: entries with their keys and indices, sorted. `memory` has room for 2 n entries.
template <class K, class Index>
const Entry<K, Index>* order_of(const Keys<K>& keys, const K* x, int64_t n, bool descending, Entry<K, Index>* memory) {
  const auto flip = descending ? std::numeric_limits<K>::max() : K(0);
  K block[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t length = std::min(kBlock, n - start);
    keys.make(x + start, length, flip, block);
    for (int64_t i = 0; i < length; ++i) memory[start + i] = {block[i], static_cast<Index>(start + i)};
  }
  return sort_entries(memory, memory + n, static_cast<size_t>(n));
}

// Rows of x along a dimension are handed, contiguous, to fill_row(row, values, indices), which writes `taken` results.
// Where the dimension is not the last, some columns at a time are turned into rows and back.
template <class K, class FillRow>
void for_rows(const Tensor& from, int64_t dim, int64_t taken, const Tensor& values, const Tensor& indices,
              FillRow&& fill_row) {
  if (values.elems() == 0) return;
  const Tensor x = contiguous(from);
  const auto [outer, n, inner] = around(x.sizes(), normalize_dim("sort", dim, x.dims()));
  const K* in = static_cast<const K*>(x.raw());
  K* out_values = static_cast<K*>(values.raw());
  int64_t* out_indices = indices.data<int64_t>();
  if (inner == 1) {
    parallel_for(outer, (kGrainElems + n - 1) / n, [&, n = n](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        fill_row(in + row * n, out_values + row * taken, out_indices + row * taken);
      }
    });
    return;
  }
  constexpr int64_t kColumns = 16;
  const int64_t groups = (inner + kColumns - 1) / kColumns;
  parallel_for(outer * groups, (kGrainElems / kColumns + n - 1) / n,
               [&, n = n, inner = inner](int64_t begin, int64_t end) {
                 const auto bytes = [](int64_t elems, size_t elem) { return elems * static_cast<int64_t>(elem); };
                 const Scratch memory(
                     static_cast<size_t>(kColumns * (bytes(taken, sizeof(int64_t)) + bytes(n + taken, sizeof(K)))));
                 auto* row_indices = memory.as<int64_t>();
                 auto* row_values = reinterpret_cast<K*>(row_indices + kColumns * taken);
                 auto* rows = row_values + kColumns * taken;
                 for (int64_t group = begin; group < end; ++group) {
                   const int64_t row = group / groups, column = group % groups * kColumns;
                   const int64_t width = std::min(kColumns, inner - column), to = row * taken * inner + column;
                   vec::transpose_copy(in + row * n * inner + column, bytes(inner, sizeof(K)), rows,
                                       bytes(n, sizeof(K)), n, width, sizeof(K));
                   for (int64_t j = 0; j < width; ++j)
                     fill_row(rows + j * n, row_values + j * taken, row_indices + j * taken);
                   vec::transpose_copy(row_values, bytes(taken, sizeof(K)), out_values + to, bytes(inner, sizeof(K)),
                                       width, taken, sizeof(K));
                   vec::transpose_copy(row_indices, bytes(taken, sizeof(int64_t)), out_indices + to,
                                       bytes(inner, sizeof(int64_t)), width, taken, sizeof(int64_t));
                 }
               });
}

template <class K, class Index>
void sort_row(const Keys<K>& keys, const K* row, int64_t n, int64_t taken, bool descending, K* values,
              int64_t* indices) {
  const Scratch memory(2 * static_cast<size_t>(n) * sizeof(Entry<K, Index>));
  const auto* order = order_of(keys, row, n, descending, memory.as<Entry<K, Index>>());
  for (int64_t i = 0; i < taken; ++i) {
    indices[i] = static_cast<int64_t>(order[i].index);
    values[i] = row[order[i].index];
  }
}

// The k first in order, by one pass that keeps the best seen so far and looks closer only at blocks which hold a better
// one.
template <class K, class Index>
void select_row(const Keys<K>& keys, const K* row, int64_t n, int64_t k, bool largest, K* values, int64_t* indices) {
  using Candidate = Entry<K, Index>;
  const auto flip = largest ? std::numeric_limits<K>::max() : K(0);
  const int64_t capacity = 2 * k + kBlock;
  const Scratch memory(static_cast<size_t>(capacity) * sizeof(Candidate));
  auto* best = memory.as<Candidate>();
  int64_t count = 0;
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key < b.key : a.index < b.index;
  };
  K limit = std::numeric_limits<K>::max();  // candidates have keys below it, once there are k
  const auto prune = [&] {
    std::nth_element(best, best + k - 1, best + count, before);
    count = k;
    limit = best[k - 1].key;
  };
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t length = std::min(kBlock, n - start);
    K block[kBlock];
    const K least = keys.make(row + start, length, flip, block);
    const bool full = count >= k;
    if (full && least >= limit) continue;
    for (int64_t i = 0; i < length; ++i) {
      if (!full || block[i] < limit) best[count++] = {block[i], static_cast<Index>(start + i)};
    }
    if (count >= 2 * k || (!full && count >= k)) prune();
  }
  if (count > k) prune();
  std::sort(best, best + k, before);
  for (int64_t i = 0; i < k; ++i) {
    indices[i] = static_cast<int64_t>(best[i].index);
    values[i] = row[best[i].index];
  }
}

constexpr int64_t kTogether = 16;

// For each of at most kTogether values, how many of n sorted elements lie before it. The searches take turns: each step
// of one waits for memory while the others go on.
template <class T>
void search(const T* list, int64_t n, const T* values, int64_t count, bool right, int64_t* found) {
  // An element lies before a value when its key is below the limit; none limits a value that lies behind everything.
  Key<T> limits[kTogether];
  bool unlimited[kTogether];
  int64_t starts[kTogether] = {};
  for (int64_t i = 0; i < count; ++i) {
    const Key<T> key = key_of(values[i]);
    const bool inclusive = right || (kHasNan<T> && key == kNanKey<T>);
    unlimited[i] = inclusive && key == std::numeric_limits<Key<T>>::max();
    limits[i] = Key<T>(key + (inclusive ? 1 : 0));
  }
  for (int64_t length = n; length > 1; length -= length / 2) {
    const int64_t half = length / 2;
    for (int64_t i = 0; i < count; ++i) {
      starts[i] += half & -static_cast<int64_t>(key_of(list[starts[i] + half - 1]) < limits[i]);  // no branch to guess
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const bool last = n > 0 && key_of(list[starts[i]]) < limits[i];
    found[i] = unlimited[i] ? n : starts[i] + (last ? 1 : 0);
  }
}

}  // namespace

void sort(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<SortAttrs>();
  const int64_t n = args.in[0].dims() == 0 ? 1 : args.in[0].size(attrs.dim);
  visit_keys(args.in[0].dtype(), n, [&]<class K, class Index>(const Keys<K>& keys, Index) {
    for_rows<K>(args.in[0], attrs.dim, n, args.out[0], args.out[1], [&](const K* row, K* values, int64_t* indices) {
      sort_row<K, Index>(keys, row, n, n, attrs.descending, values, indices);
    });
  });
}

void topk(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<TopkAttrs>();
  const int64_t n = args.in[0].dims() == 0 ? 1 : args.in[0].size(attrs.dim);
  visit_keys(args.in[0].dtype(), n, [&]<class K, class Index>(const Keys<K>& keys, Index) {
    const auto fill_row = attrs.k > n / 4 ? &sort_row<K, Index> : &select_row<K, Index>;
    for_rows<K>(args.in[0], attrs.dim, attrs.k, args.out[0], args.out[1],
                [&](const K* row, K* values, int64_t* indices) {
                  fill_row(keys, row, n, attrs.k, attrs.largest, values, indices);
                });
  });
}

void unique(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<UniqueAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const int64_t n = x.elems();
  const Tensor inverse = Tensor::empty(attrs.inverse ? x.sizes() : Shape{0}, DType::kI64);
  visit_keys(x.dtype(), n, [&]<class K, class Index>(const Keys<K>& keys, Index) {
    const K* in = static_cast<const K*>(x.raw());
    using Item = Entry<K, Index>;
    const Scratch memory(2 * static_cast<size_t>(n) * sizeof(Item));
    const auto* order = order_of(keys, in, n, false, memory.as<Item>());
    // NaN differs from every NaN.
    const auto starts_run = [&](int64_t i) {
      return i == 0 || order[i].key != order[i - 1].key ||
             (keys.has_nan && order[i].key == std::numeric_limits<K>::max());
    };
    int64_t runs = 0;
    for (int64_t i = 0; i < n; ++i) runs += starts_run(i);
    const Tensor values = Tensor::empty({runs}, x.dtype());
    const Tensor counts = Tensor::empty({attrs.counts ? runs : 0}, DType::kI64);
    K* value = static_cast<K*>(values.raw());
    int64_t* count = attrs.counts ? counts.data<int64_t>() : nullptr;
    int64_t* place = attrs.inverse ? inverse.data<int64_t>() : nullptr;
    for (int64_t i = 0, run = -1, start = 0; i < n; ++i) {
      if (starts_run(i)) {
        value[++run] = in[order[i].index];
        if (count && run > 0) count[run - 1] = i - start;
        start = i;
      }
      if (place) place[order[i].index] = run;
      if (count && i + 1 == n) count[run] = n - start;
    }
    args.out[0] = values;
    args.out[1] = inverse;
    args.out[2] = counts;
  });
}

void searchsorted(const KernelArgs& args) {
  const bool right = args.attrs.get<SearchAttrs>().right;
  const Tensor boundaries = contiguous(args.in[0]), values = contiguous(args.in[1]);
  if (values.elems() == 0) return;
  const int64_t n = boundaries.size(-1);
  const bool shared = boundaries.dims() == 1;
  const int64_t per_row = shared ? values.elems() : values.size(-1);
  visit_sortable(boundaries.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* rows = boundaries.data<T>();
    const T* value = values.data<T>();
    int64_t* out = args.out[0].data<int64_t>();
    parallel_for(values.elems(), kGrainElems / 8, [&](int64_t begin, int64_t end) {
      while (begin < end) {  // values of one row
        const int64_t row = begin / per_row, stop = std::min(end, (row + 1) * per_row);
        const T* list = rows + row * n;
        for (; begin < stop; begin += kTogether) {
          search(list, n, value + begin, std::min(kTogether, stop - begin), right, out + begin);
        }
        begin = stop;
      }
    });
  });
}

void bincount(const KernelArgs& args) {
  const Tensor x = contiguous(args.in[0], DType::kI64);
  const auto list = x.span<int64_t>();
  int64_t least = 0, most = -1;
  vec::reduce_row(vec::ReduceOp::kMin, DType::kI64)(list.data(), x.elems(), &least);
  vec::reduce_row(vec::ReduceOp::kMax, DType::kI64)(list.data(), x.elems(), &most);
  CHORALE_CHECK(least >= 0, "[bincount] counts non-negative integers, but element ",
                std::ranges::find(list, least) - list.begin(), " is ", least);
  const int64_t bins = std::max(args.attrs.get<BincountAttrs>().minlength, most + 1);
  if (args.in.size() < 2 || !args.in[1].defined()) {
    args.out[0] = Tensor::empty({bins}, DType::kI64);
    int64_t* counts = args.out[0].data<int64_t>();
    std::fill_n(counts, bins, 0);
    for (int64_t value : list) ++counts[value];
    return;
  }
  // One after the other: the sums are those of the order of x.
  const Tensor weights = contiguous(args.in[1], DType::kF64), sums = Tensor::empty({bins}, DType::kF64);
  double* total = sums.data<double>();
  const double* weight = weights.data<double>();
  std::fill_n(total, bins, 0);
  for (int64_t value : list) total[value] += *weight++;
  args.out[0] = contiguous(sums, args.in[1].dtype() == DType::kF32 ? DType::kF32 : DType::kF64);
}

}  // namespace chorale::kernel::cpu
