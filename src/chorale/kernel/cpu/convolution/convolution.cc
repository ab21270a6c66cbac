#include "chorale/kernel/cpu/convolution/convolution.h"

#include <cstring>

#include "chorale/kernel/cpu/convolution/convolution_engine.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

Tensor in_layout(const Tensor& x, bool channels_last) {
  if (!channels_last) return contiguous(x);
  if (x.is_channels_last()) return x;
  Tensor copy = Tensor::empty_strided(x.sizes(), channels_last_strides(x.sizes()), x.dtype());
  copy_into(x, copy);
  return copy;
}

// x is what is gathered from, y what is gathered, whichever of the three is the result.
Convolution describe(const Tensor& x, const Tensor& w, const Tensor& y, const ConvolutionAttrs& attrs,
                     bool channels_last) {
  const size_t spatial = x.sizes().size() - 2;
  Convolution c{.dtype = x.dtype(),
                .spatial = static_cast<int>(spatial),
                .batch = x.size(0),
                .groups = attrs.groups,
                .in_channels = x.size(1),
                .out_channels = y.size(1),
                .in = {},
                .out = {},
                .kernel = {},
                .stride = {},
                .pad = {},
                .dilation = {},
                .channels_last = channels_last};
  for (size_t d = 0; d < spatial; ++d) {
    c.in[d] = x.sizes()[d + 2];
    c.out[d] = y.sizes()[d + 2];
    c.kernel[d] = w.sizes()[d + 2];
    c.stride[d] = attrs.stride[d];
    c.pad[d] = attrs.padding[d];
    c.dilation[d] = attrs.dilation[d];
  }
  return c;
}

void zero(const Tensor& x) { std::memset(x.raw(), 0, static_cast<size_t>(x.elems()) * x.elem_bytes()); }
bool follows_channels_last(const Tensor& x) { return !x.is_contiguous() && x.is_channels_last(); }

}  // namespace

void convolution(const KernelArgs& args) {
  const Tensor& y = args.out[0];
  if (y.elems() == 0) return;
  const bool last = follows_channels_last(y);
  const Tensor x = in_layout(args.in[0], last), w = contiguous(args.in[1]);
  const Tensor bias = args.in[2].defined() ? contiguous(args.in[2]) : Tensor{};
  convolution_forward(describe(x, w, y, args.attrs.get<ConvolutionAttrs>(), last), x.raw(), w.raw(),
                      bias.defined() ? bias.raw() : nullptr, y.raw());
}

void convolution_transpose(const KernelArgs& args) {
  const Tensor& x = args.out[0];
  if (x.elems() == 0) return;
  if (args.in[0].elems() == 0) return zero(x);
  const bool last = follows_channels_last(x);
  const Tensor y = in_layout(args.in[0], last), w = contiguous(args.in[1]);
  convolution_backward_data(describe(x, w, y, args.attrs.get<ConvolutionAttrs>(), last), y.raw(), w.raw(), x.raw());
}

void convolution_weight(const KernelArgs& args) {
  const Tensor& w = args.out[0];
  if (w.elems() == 0) return;
  if (args.in[0].elems() == 0 || args.in[1].elems() == 0) return zero(w);
  const bool last = follows_channels_last(args.in[0]);
  const Tensor x = in_layout(args.in[0], last), y = in_layout(args.in[1], last);
  convolution_backward_weights(describe(x, w, y, args.attrs.get<ConvolutionAttrs>(), last), x.raw(), y.raw(), w.raw(),
                               nullptr);
}

}  // namespace chorale::kernel::cpu
