// The places of a contiguous tensor that an index names, and moving elements between them and a contiguous list.
//
// For each of `outer` blocks of the tensor and each of `count` picks there is a row of `pieces` runs; a run is `run`
// elements that lie side by side. The list holds them in that order: [outer, count, pieces, run]. With one index along
// a dimension, a pick is a slice and has one piece; several indices with whole dimensions between them make more.
#pragma once

#include <cstddef>
#include <vector>

#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel::cpu {

class Picks {
 public:
  // Slices of a dimension; indices are contiguous i64, in range.
  Picks(const Around& parts, const Tensor& indices);
  // x[i0, i1, …]: checks the indices.
  Picks(const char* op, const Shape& x, std::span<const Tensor> indices);
  Picks(Picks&&) = default;  // moving a vector leaves its elements where offsets_ sees them
  Picks& operator=(Picks&&) = default;

  int64_t elems() const { return outer_ * count_ * row(); }
  int64_t row() const { return static_cast<int64_t>(pieces_.size()) * run_; }

  // list = the picked elements.
  void take(const void* tensor, void* list, size_t elem) const;
  // The picked elements = list; a place named twice gets the last.
  void put(const void* list, void* tensor, size_t elem) const;
  // The picked elements = one value.
  void fill(const void* value, void* tensor, size_t elem) const;
  // The picked elements += list, in the order of the list: the sums do not depend on threads. f(place, value) adds.
  template <class T, class Add>
  void add(const T* list, T* tensor, Add&& add_to) const {
    for_each_run(sizeof(T), [&](int64_t list_at, int64_t tensor_at, int64_t n) {
      const T* from = list + list_at;
      T* to = tensor + tensor_at;
      for (int64_t j = 0; j < n; ++j) add_to(to[j], from[j]);
    });
  }

 private:
  // Calls f(list offset, tensor offset, elements). A place is always visited by one thread, in the order of picks:
  // threads share out blocks, or else the elements of each run.
  template <class F>
  void for_each_run(size_t elem, F&& f) const {
    const auto pieces = static_cast<int64_t>(pieces_.size());
    const auto visit = [&](int64_t outer_begin, int64_t outer_end, int64_t begin, int64_t end) {
      for (int64_t o = outer_begin; o < outer_end; ++o) {
        for (int64_t b = 0; b < count_; ++b) {
          const int64_t pick = o * outer_step_ + offsets_[static_cast<size_t>(b)];
          int64_t at = (o * count_ + b) * row() + begin;
          for (int64_t p = 0; p < pieces; ++p, at += run_)
            f(at, pick + pieces_[static_cast<size_t>(p)] + begin, end - begin);
        }
      }
    };
    if (elems() == 0) return;
    if (outer_ == 1 && row() == 1) {
      for (int64_t b = 0; b < count_; ++b) f(b, offsets_[static_cast<size_t>(b)], 1);
      return;
    }
    const auto bytes = static_cast<int64_t>(elem);
    if (outer_ > 1) {
      parallel_for(outer_, items_grain(count_ * row() * bytes),
                   [&](int64_t begin, int64_t end) { visit(begin, end, 0, run_); });
    } else {
      // A thread takes no less than a few cache lines of a run each.
      parallel_for(run_, std::max<int64_t>(256 / bytes, items_grain(count_ * pieces * bytes)),
                   [&](int64_t begin, int64_t end) { visit(0, outer_, begin, end); });
    }
  }

  int64_t outer_ = 1;
  int64_t outer_step_ = 0;
  int64_t count_ = 0;
  int64_t run_ = 1;
  std::span<const int64_t> offsets_;  // by pick
  std::vector<int64_t> pieces_{0};
  // What offsets_ looks at: indices of single elements are their offsets.
  Tensor indices_;
  std::vector<int64_t> computed_;
};

}  // namespace chorale::kernel::cpu
