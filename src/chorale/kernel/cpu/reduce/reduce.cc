#include "chorale/kernel/cpu/reduce/reduce.h"

#include <algorithm>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/reduce/reduce_plan.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu {
namespace {

// Elements of a unit of work: large enough to hide what it costs to start one, small enough for the second-level cache.
constexpr int64_t kUnitElems = 64 * 1024;
// Tiles that keep every thread busy; with fewer, the reduced dimensions are cut into blocks too.
constexpr int64_t kManyTiles = 32;
constexpr int64_t kRowTile = 256;      // results of a tile when folding rows
constexpr int64_t kColumnTile = 1024;  // and when folding columns
// Runs shorter than these are gathered first: a call of a vector loop would cost more than its work.
constexpr int64_t kShortRow = 16, kShortColumns = 8;
constexpr int64_t kWideColumns = 64;    // columns that make a vector loop worth while
constexpr int64_t kGatherElems = 2048;  // elements gathered at a time
// At most so many runs are folded one after the other into an accumulator; beyond, halves are folded apart and
// combined, so that errors grow with the logarithm.
constexpr int64_t kChain = 16;

constexpr size_t kMaxElemBytes = 16;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One reduction. Results are cut into tiles and reduced positions into blocks (of fixed sizes); a unit of work folds
// one block into the accumulators of one tile, in one of four ways:
//   rows directly       the innermost reduced dimension is contiguous
//   columns directly    the innermost kept dimension is contiguous
//   gathered rows       neither, or too short: elements are first copied to contiguous memory
//   gathered columns    likewise, where few elements become one
class Reducer {
 public:
  Reducer(const Tensor& x, DimMask reduced, const Fold& fold, const Tensor& out)
      : fold_(fold),
        plan_(plan_reduce(x, reduced)),
        x_(static_cast<const std::byte*>(x.raw())),
        out_(static_cast<std::byte*>(out.raw())),
        elem_(static_cast<int64_t>(x.elem_bytes())),
        fold_elem_(static_cast<int64_t>(size_of(fold.in))),
        out_elem_(static_cast<int64_t>(size_of(fold.out))),
        acc_(static_cast<int64_t>(fold.acc_bytes)),
        convert_(x.dtype() == fold.in ? nullptr : vec::convert_loop(x.dtype(), fold.in)) {
    choose();
  }

  void run() {
    const int64_t kept = plan_.kept_count;
    const int64_t units = tiles() * blocks_;
    const int64_t grain = divide_up(kUnitElems, 2 * std::max<int64_t>(1, tile_ * block_));
    if (blocks_ == 1) {
      parallel_for(units, grain, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) fold_and_finish(unit);
      });
      return;
    }
    // partial[block][result]; tiles of one block are neighbours in time, since they may read the same cache lines.
    Scratch partials(static_cast<size_t>(blocks_ * kept * acc_));
    auto* partial = partials.as<std::byte>();
    parallel_for(units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t block = unit / tiles();
        const auto [first, last] = tile_range(unit % tiles());
        fold_unit(first, last, block * block_, std::min((block + 1) * block_, plan_.reduced_count),
                  partial + (block * kept + first) * acc_);
      }
    });
    for (int64_t step = 1; step < blocks_; step *= 2) {
      for (int64_t block = 0; block + step < blocks_; block += 2 * step) {
        fold_.combine(partial + (block + step) * kept * acc_, kept, partial + block * kept * acc_);
      }
    }
    for (int64_t first = 0; first < kept; first += kColumnTile) {
      finish(first, std::min(first + kColumnTile, kept), partial + first * acc_);
    }
  }

 private:
  void choose() {
    const PlanDim& kept = plan_.kept.back();
    const PlanDim& reduced = plan_.reduced.back();
    const int64_t row_run = reduced.in_bytes == elem_ ? reduced.size : 0;
    const int64_t column_run = kept.in_bytes == elem_ ? kept.size : 0;
    if (column_run > 0 && column_run < kWideColumns && reduced.in_bytes == column_run * elem_) {
      wide_ = kWideColumns / column_run;
    }
    const bool row_fits = row_run >= kShortRow || (plan_.kept_count == 1 && row_run == plan_.reduced_count);
    const bool column_fits = column_run >= kShortColumns || (wide_ > 1 && reduced.size >= 2 * wide_);
    direct_ = !convert_ && (row_fits || column_fits);
    by_rows_ = row_fits || (!column_fits && (plan_.reduced_count >= 64 || plan_.kept_count < kShortRow));

    run_ = direct_ && !by_rows_ ? kept.size : plan_.kept_count;
    if (by_rows_) {
      tile_ = std::clamp<int64_t>(kUnitElems / std::max<int64_t>(1, plan_.reduced_count), 1, kRowTile);
      leaf_ = direct_ ? kChain * reduced.size : kGatherElems;
    } else {
      tile_ = direct_ ? kColumnTile
                      : std::clamp<int64_t>(kGatherElems / std::max<int64_t>(1, plan_.reduced_count), 64, kColumnTile);
      leaf_ = direct_ ? kChain * reduced.size : kGatherElems / tile_;
    }
    tile_ = std::min(tile_, run_);
    block_ = plan_.reduced_count;
    const bool rows_apart = direct_ && by_rows_ && plan_.kept_count > 1 && rows_lie_apart();
    if (rows_apart) tile_ = std::min(kRowTile, run_);
    if ((tiles() < kManyTiles || rows_apart) && tile_ * block_ > 2 * kUnitElems) {
      // Whole runs where possible.
      const int64_t wanted = rows_apart ? std::max(reduced.size, kUnitElems / tile_) : kUnitElems / tile_;
      block_ = std::min(reduced.size <= wanted ? wanted / reduced.size * reduced.size : wanted, plan_.reduced_count);
      blocks_ = divide_up(plan_.reduced_count, block_);
    }
  }

  // Is the next row of a result farther away than that of the next result, as for the channels of a batch of images?
  // If so, memory is read in order when a block has one row of every result.
  bool rows_lie_apart() const {
    const size_t dims = plan_.reduced.size();
    return dims > 1 && plan_.reduced.back().size >= 64 && plan_.reduced[dims - 2].in_bytes > plan_.kept.back().in_bytes;
  }

  int64_t tiles() const { return plan_.kept_count / run_ * divide_up(run_, tile_); }
  std::pair<int64_t, int64_t> tile_range(int64_t tile) const {
    const int64_t per_run = divide_up(run_, tile_);
    const int64_t start = tile / per_run * run_;
    const int64_t first = tile % per_run * tile_;
    return {start + first, start + std::min(first + tile_, run_)};
  }

  void fold_and_finish(int64_t tile) const {
    static_assert(kColumnTile >= kRowTile);
    alignas(64) std::byte acc[kColumnTile * kMaxAccBytes];
    const auto [first, last] = tile_range(tile);
    fold_unit(first, last, 0, plan_.reduced_count, acc);
    finish(first, last, acc);
  }

  void finish(int64_t first, int64_t last, std::byte* acc) const {
    if (plan_.in_order) {
      fold_.finish(acc, last - first, out_ + first * out_elem_);
      return;
    }
    alignas(64) std::byte results[kColumnTile * kMaxElemBytes];
    fold_.finish(acc, last - first, results);
    const std::byte* from = results;
    for_runs(plan_.kept, first, last, [&](int64_t, int64_t at, int64_t n) {
      vec::scatter_strided(from, out_ + at * out_elem_, plan_.kept.back().out_elems * out_elem_, n,
                           static_cast<size_t>(out_elem_));
      from += n * out_elem_;
    });
  }

  // Reduced positions [begin, end) of results [first, last) into their accumulators, which are set.
  void fold_unit(int64_t first, int64_t last, int64_t begin, int64_t end, std::byte* acc) const {
    fold_.identity(acc, last - first);
    if (begin == end) return;
    if (by_rows_ && direct_ && plan_.reduced.size() == 1 && end - begin <= leaf_) {  // the usual case, without detours
      for_runs(plan_.kept, first, last, [&](int64_t at, int64_t, int64_t n) {
        const std::byte* row = x_ + at + begin * elem_;
        for (int64_t i = 0; i < n; ++i, row += plan_.kept.back().in_bytes, acc += acc_)
          fold_.row(row, end - begin, acc);
      });
    } else if (by_rows_) {
      for_runs(plan_.kept, first, last, [&](int64_t at, int64_t, int64_t n) {
        for (int64_t i = 0; i < n; ++i, at += plan_.kept.back().in_bytes, acc += acc_) {
          fold_range(begin, end, 1, acc,
                     [&](int64_t from, int64_t to, std::byte* target) { fold_row(x_ + at, from, to, target); });
        }
      });
    } else if (direct_) {
      for_runs(plan_.kept, first, last, [&](int64_t at, int64_t, int64_t n) {
        fold_range(begin, end, n, acc, [&](int64_t from, int64_t to, std::byte* target) {
          for_runs(plan_.reduced, from, to,
                   [&](int64_t offset, int64_t, int64_t rows) { fold_columns(x_ + at + offset, rows, n, target); });
        });
      });
    } else {
      fold_range(begin, end, last - first, acc, [&](int64_t from, int64_t to, std::byte* target) {
        fold_gathered_columns(first, last, from, to, target);
      });
    }
  }

  // Calls leaf(begin, end, acc) for pieces of at most leaf_ positions, halves combined pairwise.
  template <class Leaf>
  void fold_range(int64_t begin, int64_t end, int64_t n, std::byte* acc, Leaf&& leaf) const {
    const int64_t pieces = divide_up(end - begin, leaf_);
    if (pieces <= 1) {
      leaf(begin, end, acc);
      return;
    }
    const int64_t middle = begin + divide_up(pieces, 2) * leaf_;
    fold_range(begin, middle, n, acc, leaf);
    const auto fold_right = [&](std::byte* right) {
      fold_.identity(right, n);
      fold_range(middle, end, n, right, leaf);
      fold_.combine(right, n, acc);
    };
    if (n == 1) {
      alignas(64) std::byte right[kMaxAccBytes];
      fold_right(right);
    } else {
      const Scratch right(static_cast<size_t>(n * acc_));
      fold_right(right.as<std::byte>());
    }
  }

  void fold_row(const std::byte* base, int64_t begin, int64_t end, std::byte* acc) const {
    if (direct_) {
      for_runs(plan_.reduced, begin, end, [&](int64_t at, int64_t, int64_t n) { fold_.row(base + at, n, acc); });
      return;
    }
    alignas(64) std::byte elements[kGatherElems * kMaxElemBytes];
    gather(base, plan_.reduced, begin, end, elements);
    fold_.row(elements, end - begin, acc);
  }

  // Few columns, one row right behind the other, are folded as if several rows were one.
  void fold_columns(const std::byte* from, int64_t rows, int64_t n, std::byte* acc) const {
    const int64_t stride = plan_.reduced.back().in_bytes;
    if (wide_ > 1 && rows >= 2 * wide_) {
      alignas(64) std::byte parts[kWideColumns * kMaxAccBytes];
      fold_.identity(parts, wide_ * n);
      fold_.columns(from, wide_ * stride, rows / wide_, wide_ * n, parts);
      for (int64_t part = 0; part < wide_; ++part) fold_.combine(parts + part * n * acc_, n, acc);
      from += rows / wide_ * wide_ * stride;
      rows %= wide_;
    }
    fold_.columns(from, stride, rows, n, acc);
  }

  void fold_gathered_columns(int64_t first, int64_t last, int64_t begin, int64_t end, std::byte* acc) const {
    static_assert(kGatherElems >= kColumnTile);
    alignas(64) std::byte elements[kGatherElems * kMaxElemBytes];
    const int64_t row_bytes = (last - first) * fold_elem_;
    std::byte* row = elements;
    if (!convert_ && plan_.reduced.size() == 1 && plan_.reduced.back().in_bytes == elem_) {
      for_runs(plan_.kept, first, last, [&](int64_t at, int64_t, int64_t n) {  // short rows become columns
        vec::transpose_copy(x_ + at + begin * elem_, plan_.kept.back().in_bytes, row, row_bytes, n, end - begin,
                            static_cast<size_t>(elem_));
        row += n * elem_;
      });
      fold_.columns(elements, row_bytes, end - begin, last - first, acc);
      return;
    }
    for_runs(plan_.reduced, begin, end, [&](int64_t at, int64_t, int64_t n) {
      for (int64_t i = 0; i < n; ++i, at += plan_.reduced.back().in_bytes, row += row_bytes) {
        gather(x_ + at, plan_.kept, first, last, row);
      }
    });
    fold_.columns(elements, row_bytes, end - begin, last - first, acc);
  }

  // Positions [begin, end) of dims, at most kGatherElems, as contiguous elements of fold_.in.
  void gather(const std::byte* base, const PlanDims& dims, int64_t begin, int64_t end, std::byte* to) const {
    const int64_t stride = dims.back().in_bytes;
    alignas(64) std::byte unconverted[kGatherElems * kMaxElemBytes];
    for_runs(dims, begin, end, [&](int64_t at, int64_t, int64_t n) {
      if (convert_ && stride == elem_) {
        convert_(base + at, to, n);
      } else if (convert_) {
        vec::gather_strided(base + at, stride, unconverted, n, static_cast<size_t>(elem_));
        convert_(unconverted, to, n);
      } else {
        vec::gather_strided(base + at, stride, to, n, static_cast<size_t>(elem_));
      }
      to += n * fold_elem_;
    });
  }

  const Fold& fold_;
  const ReducePlan plan_;
  const std::byte* const x_;
  std::byte* const out_;
  const int64_t elem_, fold_elem_, out_elem_, acc_;
  const vec::Convert convert_;  // from x's dtype to fold_.in; null when they are the same

  bool by_rows_ = true, direct_ = true;
  int64_t run_ = 1;    // tiles do not cross multiples of this many results
  int64_t tile_ = 1;   // results of a tile
  int64_t block_ = 1;  // reduced positions of a block
  int64_t blocks_ = 1;
  int64_t leaf_ = 1;  // reduced positions folded without combining
  int64_t wide_ = 1;  // rows of few columns that are folded as one
};

}  // namespace

void reduce(const Tensor& x, DimMask reduced, const Fold& fold, const Tensor& out) {
  if (out.elems() > 0) Reducer(x, reduced, fold, out).run();
}

}  // namespace chorale::kernel::cpu
