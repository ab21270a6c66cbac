#include "chorale/kernel/cpu/product/fp8_linear.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/fp8.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kCopies = 4;  // of a scale

// All dimensions but the last as one, in f32.
Tensor folded(const Tensor& any) {
  const Tensor x = contiguous(any, DType::kF32);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dims(); ++d) rows *= x.size(d);
  return x.view_as({rows, x.size(-1)}, {x.size(-1), 1}, x.offset());
}

struct Rounded {
  Tensor values;  // f32, as the bytes and the scale say
  float scale = 1;
};
// Bytes are written to `bytes`, if there is memory for them, in the order of x or turned.
Rounded rounded(const Tensor& x, Fp8 format, const Tensor& bytes, bool turned) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const float* const from = x.data<float>();
  float largest = 0;
  for (int64_t i = 0; i < rows * columns; ++i) {
    // NaN stays, whatever comes behind it.
    if (!(std::fabs(from[i]) <= largest) && !std::isnan(largest)) largest = std::fabs(from[i]);
  }
  const auto [up, down] = fp8_scale(largest, format);
  std::array<float, 256> values;
  for (size_t byte = 0; byte < values.size(); ++byte)
    values[byte] = from_fp8(static_cast<uint8_t>(byte), format) * down;
  Rounded result{Tensor::empty({rows, columns}, DType::kF32), down};
  float* const to = result.values.data<float>();
  uint8_t* const out = bytes.defined() ? bytes.data<uint8_t>() : nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const uint8_t byte = to_fp8(from[row * columns + column] * up, format);
      to[row * columns + column] = values[byte];
      if (out) out[turned ? column * rows + row : row * columns + column] = byte;
    }
  }
  return result;
}

// The values of bytes.
Tensor values_of(const Tensor& bytes_any, Fp8 format, float scale) {
  const Tensor bytes = contiguous(bytes_any), values = Tensor::empty(bytes.sizes(), DType::kF32);
  std::transform(bytes.data<uint8_t>(), bytes.data<uint8_t>() + bytes.elems(), values.data<float>(),
                 [&](uint8_t byte) { return from_fp8(byte, format) * scale; });
  return values;
}

// out = a b + bias for a [m, k] and b [k, n] with these strides, summed in f32.
void multiply_values(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& out) {
  if (out.elems() == 0) return;
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const Tensor sums = out.dtype() == DType::kF32 ? out : Tensor::empty(out.sizes(), DType::kF32);
  const Tensor added = bias.defined() ? contiguous(bias, DType::kF32) : bias;
  product({.dtype = DType::kF32,
           .m = m,
           .n = n,
           .k = k,
           .a = a.raw(),
           .b = b.raw(),
           .c = sums.raw(),
           .a_row = a.stride(0),
           .a_col = a.stride(1),
           .b_row = b.stride(0),
           .b_col = b.stride(1),
           .c_row = n,
           .c_col = 1,
           .bias = added.defined() ? added.raw() : nullptr});
  if (!sums.is(out)) copy_into(sums, out);
}

Tensor turned(const Tensor& x) { return x.view_as({x.size(1), x.size(0)}, {x.stride(1), x.stride(0)}, x.offset()); }

}  // namespace

void fp8_linear(const KernelArgs& args) {
  const bool in_first = args.attrs.get<Fp8LinearAttrs>().in_first;
  const Rounded x = rounded(folded(args.in[0]), Fp8::kE4m3, args.out[1], true);
  const Rounded weight = rounded(contiguous(args.in[1], DType::kF32), Fp8::kE4m3, args.out[2], !in_first);
  float* const scales = args.out[3].data<float>();
  std::fill(scales, scales + kCopies, x.scale);
  std::fill(scales + kCopies, scales + 2 * kCopies, weight.scale);
  multiply_values(x.values, in_first ? weight.values : turned(weight.values), args.in[2], args.out[0]);
}

void fp8_linear_backward(const KernelArgs& args) {
  const bool in_first = args.attrs.get<Fp8LinearAttrs>().in_first;
  const Tensor scales = contiguous(args.in[3], DType::kF32);
  const Tensor x = values_of(args.in[1], Fp8::kE4m3, scales.data<float>()[0]);
  const Tensor weight = values_of(args.in[2], Fp8::kE4m3, scales.data<float>()[kCopies]);
  const Tensor dy = rounded(folded(args.in[0]), Fp8::kE5m2, {}, false).values;
  multiply_values(dy, turned(weight), {}, args.out[0]);
  if (in_first) {
    multiply_values(x, dy, {}, args.out[1]);
  } else {
    multiply_values(turned(dy), turned(x), {}, args.out[1]);
  }
}

}  // namespace chorale::kernel::cpu
