// Kernels that work along one dimension of row-major tensors, line by line.
#pragma once

#include <algorithm>
#include <array>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel::cpu {

// Calls f(in, out, line) for every line: in[i] is the line of input i as numbers to compute with, `out` has room for
// the result (null where there is no output), `line` counts the lines in row-major order. f runs on several threads.
// Lines that are not contiguous are brought together a block at a time: neighbours share the cache lines that they are
// spread over.
template <class S, size_t kInputs, class F>
void for_lines(const Around& lines, const std::array<const S*, kInputs>& in, S* out, F&& f) {
  static_assert(kInputs == 1 || kInputs == 2);
  using C = Compute<S>;
  constexpr int64_t kBlock = 16;
  const int64_t n = lines.length, inner = lines.inner;
  const int64_t block = std::min(inner, kBlock), blocks = inner == 0 ? 0 : (inner + block - 1) / block;
  parallel_for(lines.outer * blocks, row_grain(n * block), [&](int64_t begin, int64_t end) {
    const int64_t buffered = inner == 1 ? 0 : block * n;
    const Scratch gathered(static_cast<size_t>(buffered) * kInputs * sizeof(S));
    const Row<S> inputs[2] = {Row<S>(n), Row<S>(kInputs == 2 ? n : 0)};
    const Row<S> result(n);
    const auto one_line = [&](const std::array<const S*, kInputs>& from, S* to, int64_t line) {
      std::array<const C*, kInputs> loaded;
      for (size_t i = 0; i < kInputs; ++i) loaded[i] = inputs[i].load(from[i], n);
      f(loaded, to ? result.target(to) : nullptr, line);
      if (to) result.store(to, n);
    };
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b % blocks * block, count = std::min(block, inner - first);
      const int64_t offset = b / blocks * n * inner + first, line = b / blocks * inner + first;
      std::array<const S*, kInputs> from;
      if (inner == 1) {
        for (size_t i = 0; i < kInputs; ++i) from[i] = in[i] + offset;
        one_line(from, out ? out + offset : nullptr, line);
        continue;
      }
      const int64_t row_bytes = inner * static_cast<int64_t>(sizeof(S)),
                    line_bytes = n * static_cast<int64_t>(sizeof(S));
      for (size_t i = 0; i < kInputs; ++i) {
        S* to = gathered.as<S>() + static_cast<int64_t>(i) * buffered;
        vec::transpose_copy(in[i] + offset, row_bytes, to, line_bytes, n, count, sizeof(S));
      }
      for (int64_t l = 0; l < count; ++l) {
        for (size_t i = 0; i < kInputs; ++i) from[i] = gathered.as<S>() + static_cast<int64_t>(i) * buffered + l * n;
        one_line(from, out ? gathered.as<S>() + l * n : nullptr, line + l);
      }
      if (out) vec::transpose_copy(gathered.as<S>(), line_bytes, out + offset, row_bytes, count, n, sizeof(S));
    }
  });
}

}  // namespace chorale::kernel::cpu
