#include "chorale/kernel/cpu/dropout.h"

#include <algorithm>
#include <cmath>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/dropout_loops.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/stretch.h"
#include "chorale/vec/random.h"

namespace chorale::kernel::cpu {

uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(std::min(std::nearbyint(p * 0x1p32), 0x1p32 - 1)); }

void dropout(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<DropoutAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const Stretch stretch(args.in[1], x.sizes());
  const uint32_t threshold = dropout_threshold(attrs.p);
  // A block of words and numbers stays in the first-level cache.
  constexpr int64_t kBlock = 2048;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const C scale = attrs.p < 1 ? static_cast<C>(1 / (1 - attrs.p)) : C(0);
    for_each_run(stretch, x.sizes(), [&](int64_t run_at, int64_t first, int64_t n) {
      parallel_for((n + kBlock - 1) / kBlock, row_grain(kBlock), [&](int64_t begin, int64_t end) {
        uint32_t words[kBlock];
        const Row<S> from(kBlock), to(kBlock);
        for (int64_t b = begin; b < end; ++b) {
          const int64_t in_run = b * kBlock, at = run_at + in_run, count = std::min(kBlock, n - in_run);
          vec::random_words(stretch.stream, static_cast<uint64_t>(first + in_run), words, count);
          S* y = args.out[0].data<S>() + at;
          drop_row(from.load(x.data<S>() + at, count), words, threshold, scale, to.target(y), count);
          to.store(y, count);
        }
      });
    });
  });
}

}  // namespace chorale::kernel::cpu
