// Sums over the rows of a matrix, column by column, by several threads, with the same bits whatever their number: rows
// are cut into blocks of a fixed size, each block has its own sums, and these are added pairwise. So the error grows
// with the logarithm of the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/floating.h"

namespace chorale::kernel::cpu {

template <class C>
class PartialSums {
 public:
  static constexpr int64_t kBlockRows = 64;

  PartialSums(int64_t rows, int64_t columns)
      : rows_(rows),
        columns_(columns),
        blocks_((rows + kBlockRows - 1) / kBlockRows),
        memory_(static_cast<size_t>(blocks_ * columns) * sizeof(C)) {}

  // Calls body(begin, end, sums) for the rows, of so many elements each, of every block; `sums` (one per column) starts
  // as zeros.
  template <class F>
  void for_blocks(int64_t row_elems, F&& body) {
    parallel_for(blocks_, std::max<int64_t>(1, row_grain(row_elems) / kBlockRows), [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        std::fill(sums(block), sums(block) + columns_, C(0));
        body(block * kBlockRows, std::min(rows_, (block + 1) * kBlockRows), sums(block));
      }
    });
  }

  int64_t blocks() const { return blocks_; }
  C* sums(int64_t block) { return memory_.as<C>() + block * columns_; }

  // The totals, once; null where there are no rows.
  const C* total() {
    for (int64_t step = 1; step < blocks_; step *= 2) {
      for (int64_t block = 0; block + step < blocks_; block += 2 * step) {
        vec::axpy(C(1), sums(block + step), sums(block), columns_);
      }
    }
    return blocks_ > 0 ? sums(0) : nullptr;
  }

 private:
  int64_t rows_, columns_, blocks_;
  Scratch memory_;
};

}  // namespace chorale::kernel::cpu
