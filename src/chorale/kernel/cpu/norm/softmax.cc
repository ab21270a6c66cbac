#include "chorale/kernel/cpu/norm/softmax.h"

#include "chorale/kernel/cpu/support/along_dim.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/view.h"

namespace chorale::kernel::cpu {
namespace {

Around lines_of(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  return around(out.sizes(), normalize_dim("softmax", args.attrs.get<DimAttrs>().dim, out.dims()));
}

template <class F>
void unary(const KernelArgs& args, F&& row) {
  const Tensor x = contiguous(args.in[0]);
  const Around lines = lines_of(args);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    for_lines<S, 1>(lines, {x.data<S>()}, args.out[0].data<S>(),
                    [&](const auto& in, auto* out, int64_t) { row(in[0], out, lines.length); });
  });
}

template <class F>
void binary(const KernelArgs& args, F&& row) {
  const Tensor dy = contiguous(args.in[0]), y = contiguous(args.in[1]);
  const Around lines = lines_of(args);
  visit_floating(y.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    for_lines<S, 2>(lines, {dy.data<S>(), y.data<S>()}, args.out[0].data<S>(),
                    [&](const auto& in, auto* out, int64_t) { row(in[0], in[1], out, lines.length); });
  });
}

}  // namespace

void softmax(const KernelArgs& args) {
  unary(args, [](const auto* x, auto* y, int64_t n) { vec::softmax_row(x, y, n); });
}
void log_softmax(const KernelArgs& args) {
  unary(args, [](const auto* x, auto* y, int64_t n) { vec::log_softmax_row(x, y, n); });
}
void softmax_backward(const KernelArgs& args) {
  binary(args, [](const auto* dy, const auto* y, auto* dx, int64_t n) { vec::softmax_backward_row(dy, y, dx, n); });
}
void log_softmax_backward(const KernelArgs& args) {
  binary(args, [](const auto* dy, const auto* y, auto* dx, int64_t n) { vec::log_softmax_backward_row(dy, y, dx, n); });
}

}  // namespace chorale::kernel::cpu
