#include <algorithm>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/loss/loss.h"
#include "chorale/kernel/cpu/loss/loss_loops.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// Elements that are worked on at a time: a block of every operand stays in the first-level cache. Sums of blocks are
// added in order, so their number of threads does not show.
constexpr int64_t kBlock = 2048;

void check_probabilities(const Tensor& x) {
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    Compute<S> low = 0, high = 1;
    vec::reduce_row(vec::ReduceOp::kMin, x.dtype())(x.data<S>(), x.elems(), &low);
    vec::reduce_row(vec::ReduceOp::kMax, x.dtype())(x.data<S>(), x.elems(), &high);
    CHORALE_CHECK(!(low < 0 || high > 1), "[binary_cross_entropy] a probability must lie between 0 and 1, not be ",
                  low < 0 ? low : high, "; for logits there is binary_cross_entropy_with_logits");
  });
}

}  // namespace

void difference_loss(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<DifferenceLossAttrs>();
  const Tensor x = contiguous(args.in[0]), y = contiguous(args.in[1]);
  const int64_t n = x.elems(), blocks = (n + kBlock - 1) / kBlock;
  const bool each = attrs.reduction == Reduction::kNone;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const Scratch sums(static_cast<size_t>(blocks) * sizeof(C));
    parallel_for(blocks, row_grain(kBlock), [&](int64_t begin, int64_t end) {
      const Row<S> x_row(kBlock), y_row(kBlock), losses(kBlock);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
        const C* p = x_row.load(x.data<S>() + at, count);
        const C* q = y_row.load(y.data<S>() + at, count);
        if (each) {
          S* out = args.out[0].data<S>() + at;
          difference_row(attrs.kind, static_cast<C>(attrs.bound), p, q, losses.target(out), count);
          losses.store(out, count);
        } else {
          sums.as<C>()[b] = difference_sum(attrs.kind, static_cast<C>(attrs.bound), p, q, count);
        }
      }
    });
    if (each) return;
    C total = 0;
    vec::reduce_row(vec::ReduceOp::kSum, dtype_of<C>)(sums.as<C>(), blocks, &total);
    if (attrs.reduction == Reduction::kMean) total /= static_cast<C>(attrs.count > 0 ? attrs.count : n);
    *args.out[0].data<S>() = static_cast<S>(total);
  });
}

void difference_loss_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<DifferenceLossAttrs>();
  const Tensor x = contiguous(args.in[1]), y = contiguous(args.in[2]);
  const int64_t n = x.elems(), blocks = (n + kBlock - 1) / kBlock;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const bool each = attrs.reduction == Reduction::kNone;
    const Tensor dloss = each ? contiguous(args.in[0]) : contiguous(args.in[0], dtype_of<C>);
    C scale = each ? C(1) : *dloss.data<C>();
    if (attrs.reduction == Reduction::kMean) scale /= static_cast<C>(attrs.count > 0 ? attrs.count : n);
    const vec::Loop mul = vec::pointwise_loop(vec::ScalarOp::kMul, dtype_of<C>);
    parallel_for(blocks, row_grain(kBlock), [&](int64_t begin, int64_t end) {
      const Row<S> x_row(kBlock), y_row(kBlock), dloss_row(kBlock), dx_row(kBlock);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
        S* out = args.out[0].data<S>() + at;
        C* dx = dx_row.target(out);
        difference_gradient(attrs.kind, static_cast<C>(attrs.bound), scale, x_row.load(x.data<S>() + at, count),
                            y_row.load(y.data<S>() + at, count), dx, count);
        if (each) {
          const void* in[] = {dx, dloss_row.load(dloss.data<S>() + at, count)};
          mul(in, dx, count, {});
        }
        dx_row.store(out, count);
      }
    });
  });
}

void binary_cross_entropy(const KernelArgs& args) {
  const Tensor x = contiguous(args.in[0]), target = contiguous(args.in[1]);
  check_probabilities(x);
  const int64_t n = x.elems(), blocks = (n + kBlock - 1) / kBlock;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    const S* values = x.data<S>();
    parallel_for(blocks, row_grain(kBlock), [&](int64_t begin, int64_t end) {
      const Row<S> x_row(kBlock), target_row(kBlock), loss_row(kBlock);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
        S* out = args.out[0].data<S>() + at;
        binary_cross_entropy_row(x_row.load(values + at, count), target_row.load(target.data<S>() + at, count),
                                 loss_row.target(out), count);
        loss_row.store(out, count);
      }
    });
  });
}

}  // namespace chorale::kernel::cpu
