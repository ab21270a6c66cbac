#include "chorale/kernel/cuda/fp8.h"

#include <algorithm>
#include <string>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/product_engine.h"
#include "chorale/kernel/fp8.h"

namespace chorale::cuda {
extern const std::string_view kFp8Cu;
}

namespace chorale::kernel::cuda {
namespace {

constexpr int64_t kCopies = 4;  // of a scale

void need_fp8(Device device) {
  constexpr int kAda = 89;
  const std::string& arch = chorale::cuda::facts_of(device).arch;
  CHORALE_CHECK_STATE(std::stoi(arch.substr(3)) >= kAda, "[fp8_linear] ", chorale::cuda::facts_of(device).name, " (",
                      arch,
                      ") has no numbers of 8 bits: that takes a GPU of the generation Ada, Hopper or later; use bf16");
}

// A matrix whose rows are contiguous, and one behind the other.
struct Bytes {
  Tensor values;  // u8
  Fp8 format;
  const float* scale;
};

Tensor bytes_like(int64_t rows, int64_t columns, Device device) {
  return Tensor::empty({rows, columns}, DType::kU8, device);
}

int64_t row_count(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dims(); ++d) rows *= x.size(d);
  return rows;
}

// Writes x [.., columns] as bytes [rows, columns], those transposed, and the scale.
void cast_both(const Tensor& any, Fp8 format, const Tensor& straight, const Tensor& turned, float* scale,
               Stream stream) {
  const Tensor x = contiguous(any, stream);
  const int64_t columns = x.size(-1), rows = row_count(x), n = rows * columns;
  constexpr int64_t kMostParts = 1024, kSquare = 128;
  const int64_t parts = std::clamp<int64_t>(blocks_for(stream.device, n / 8), 1, kMostParts);
  const Tensor largest = Tensor::empty({parts}, DType::kI32, stream.device);
  launch(instance(stream, chorale::cuda::kFp8Cu, "fp8_largest", {x.dtype()}), {.x = static_cast<unsigned>(parts)},
         stream, x.raw(), n, largest.raw());
  const bool whole = rows % kSquare == 0 && columns % kSquare == 0 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  const int64_t squares = ((rows + kSquare - 1) / kSquare) * ((columns + kSquare - 1) / kSquare);
  const bool gradient = format == Fp8::kE5m2;
  const char* const more = gradient ? (whole ? "true, true" : "true, false") : whole ? "false, true" : "false, false";
  launch(instance(stream, chorale::cuda::kFp8Cu, "fp8_cast", {x.dtype()}, more),
         {.x = static_cast<unsigned>(std::max<int64_t>(squares, 1))}, stream, x.raw(), rows, columns, largest.raw(),
         parts, straight.raw(), turned.raw(), scale);
}

// What cuBLASLt can read: contiguous, and from a multiple of 16 bytes on.
Tensor readable_bytes(const Tensor& any, DType dtype, Stream stream) {
  const Tensor x = contiguous(any, dtype, stream);
  if (reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0) return x;
  const Tensor copy = Tensor::empty(x.sizes(), dtype, x.device());
  copy_into(x, copy, stream);
  return copy;
}

// c [m, n] = a b^T + bias for a [m, k] and b [n, k].
void multiply_bytes(const Bytes& a, const Bytes& b, const Tensor& bias_any, const Tensor& c, Stream stream) {
  const int64_t m = a.values.size(0), n = b.values.size(0), k = a.values.size(1);
  if (m == 0 || n == 0) return;
  const Tensor bias = bias_any.defined() ? contiguous(bias_any, stream) : bias_any;
  constexpr int64_t kStep = 16;
  if (m % kStep != 0 || n % kStep != 0 || k % kStep != 0 || k == 0 || c.dtype() == DType::kF64) {
    const auto is_gradient = [](const Bytes& x) { return x.format == Fp8::kE5m2; };
    const std::string more = concat(is_gradient(a) ? "true" : "false", ", ", is_gradient(b) ? "true" : "false");
    const void* const added = bias.defined() ? bias.raw() : nullptr;
    launch(instance(stream, chorale::cuda::kFp8Cu, "fp8_product", {c.dtype()}, more.c_str()),
           {.x = blocks_for(stream.device, m * n)}, stream, a.values.raw(), b.values.raw(), added, c.raw(), m, n, k,
           a.scale, b.scale);
    return;
  }
  // cuBLASLt adds a bias of 16 bits only.
  const bool in_epilogue = bias.defined() && is_half(c.dtype());
  if (bias.defined() && !in_epilogue) {
    const Tensor rows = c.view_as({m, n}, {n, 1}, c.offset());
    copy_into(bias.view_as({m, n}, {0, 1}, bias.offset()), rows, stream);
  }
  product({.dtype = DType::kU8,
           .m = m,
           .n = n,
           .k = k,
           .a = a.values.raw(),
           .b = b.values.raw(),
           .c = c.raw(),
           .a_row = k,
           .a_col = 1,
           .b_row = 1,
           .b_col = k,
           .c_row = n,
           .beta = bias.defined() && !in_epilogue ? 1.0 : 0.0,
           .bias = in_epilogue ? bias.raw() : nullptr,
           .c_dtype = c.dtype(),
           .a_format = a.format,
           .b_format = b.format,
           .a_scale = a.scale,
           .b_scale = b.scale},
          stream);
}

}  // namespace

void fp8_linear(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor &x_turned = args.out[1], &weight_in_out = args.out[2];
  need_fp8(stream.device);
  auto* const scales = static_cast<float*>(args.out[3].raw());
  const int64_t in = weight_in_out.size(0), outs = weight_in_out.size(1), rows = x_turned.size(1);
  const Tensor x = bytes_like(rows, in, stream.device), weight_out_in = bytes_like(outs, in, stream.device);
  cast_both(args.in[0], Fp8::kE4m3, x, x_turned, scales, stream);
  const bool in_first = args.attrs.get<Fp8LinearAttrs>().in_first;
  cast_both(args.in[1], Fp8::kE4m3, in_first ? weight_in_out : weight_out_in, in_first ? weight_out_in : weight_in_out,
            scales + kCopies, stream);
  multiply_bytes({x, Fp8::kE4m3, scales}, {weight_out_in, Fp8::kE4m3, scales + kCopies}, args.in[2], args.out[0],
                 stream);
}

void fp8_linear_backward(const KernelArgs& args) {
  const Stream stream = args.stream;
  need_fp8(stream.device);
  const Tensor scales = readable_bytes(args.in[3], DType::kF32, stream);
  const auto* const scale = static_cast<const float*>(scales.raw());
  const Bytes x{readable_bytes(args.in[1], DType::kU8, stream), Fp8::kE4m3, scale};                 // [in, rows]
  const Bytes weight{readable_bytes(args.in[2], DType::kU8, stream), Fp8::kE4m3, scale + kCopies};  // [in, out]
  const int64_t outs = weight.values.size(1), rows = x.values.size(1);
  const Tensor own = Tensor::empty({kCopies}, DType::kF32, stream.device);
  auto* const dy_scale = static_cast<float*>(own.raw());
  const Bytes dy{bytes_like(rows, outs, stream.device), Fp8::kE5m2, dy_scale};
  const Bytes turned{bytes_like(outs, rows, stream.device), Fp8::kE5m2, dy_scale};
  cast_both(args.in[0], Fp8::kE5m2, dy.values, turned.values, dy_scale, stream);
  multiply_bytes(dy, weight, {}, args.out[0], stream);
  const bool in_first = args.attrs.get<Fp8LinearAttrs>().in_first;
  multiply_bytes(in_first ? x : turned, in_first ? turned : x, {}, args.out[1], stream);
}

}  // namespace chorale::kernel::cuda
