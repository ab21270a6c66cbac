// A stretch of a generator's stream (base/generator.h), as random rows take it for an input: i64 [2], the seed and the
// offset. That of a shard goes on with where the shard begins and how long the whole is, dimension by dimension: i64
// [2 + 2 * dims]. Its elements then draw what they would draw in the whole tensor.
#pragma once

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/base/philox.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

class Stretch {
 public:
  // `drawn`: what the numbers are drawn for.
  Stretch(const Tensor& stretch, const Shape& drawn) {
    const auto count = static_cast<size_t>(stretch.elems());
    CHORALE_CHECK(count == 2 || count == 2 + 2 * drawn.size(), "[random] a stretch for a tensor of shape ", drawn,
                  " has 2 or ", 2 + 2 * drawn.size(), " elements, not ", count);
    const int64_t* from = stretch.data<int64_t>();
    const int64_t step = stretch.strides()[0];
    stream = {static_cast<uint64_t>(from[0]), static_cast<uint64_t>(from[step])};
    placed = count > 2;
    for (size_t i = 2; i < count; ++i) place[i - 2] = from[static_cast<int64_t>(i) * step];
  }

  RandomStream stream;
  bool placed;                  // a part of the whole, at `place`: begin, whole, begin, whole, …
  int64_t place[2 * kMaxDims];  // unset unless `placed`: every random op makes one of these
};

// Which element of the whole is element `at` of a tensor of these sizes.
inline int64_t whole_index(const Stretch& stretch, const Shape& sizes, int64_t at) {
  if (!stretch.placed) return at;
  int64_t index = 0, stride = 1;
  for (size_t d = sizes.size(); d-- > 0; at /= sizes[d]) {
    index += (stretch.place[2 * d] + at % sizes[d]) * stride;
    stride *= stretch.place[2 * d + 1];
  }
  return index;
}

// Calls f(at, first, count) for runs that cover a tensor of these sizes: its elements from `at` on are those from
// `first` on of the whole.
template <class F>
void for_each_run(const Stretch& stretch, const Shape& sizes, F&& f) {
  const int64_t elems = count_elems(sizes);
  if (elems == 0) return;
  if (!stretch.placed) {
    f(int64_t{0}, int64_t{0}, elems);
    return;
  }
  const int64_t run = sizes.back();
  for (int64_t at = 0; at < elems; at += run) f(at, whole_index(stretch, sizes, at), run);
}

}  // namespace chorale::kernel
