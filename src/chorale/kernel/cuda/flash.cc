#include "chorale/kernel/cuda/flash.h"

#include <algorithm>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::cuda {
extern const std::string_view kFlashCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kFlashCu;

constexpr int64_t kRowsPerBlock = 64;

// What kernels see (flash.cu).
struct Matrices {
  void* data = nullptr;
  int64_t row = 0;
  int64_t lead[8] = {};
};
struct FlashCall {
  int64_t queries = 0, keys = 0, causal = 0, lead_dims = 0, group = 1;
  int64_t lead_sizes[8] = {};
  float scale = 1;
  Matrices q, k, v, out, dout, dq, dk, dv;
  void* lse = nullptr;
  void* delta = nullptr;
};

// Rows are read 16 bytes at a time.
bool is_aligned(const Tensor& x) {
  if (x.stride(-1) != 1 || reinterpret_cast<uintptr_t>(x.raw()) % 16 != 0) return false;
  for (int64_t d = 0; d + 1 < x.dims(); ++d) {
    if (x.size(d) > 1 && x.stride(d) % 8 != 0) return false;
  }
  return true;
}
Tensor aligned(const Tensor& x, Stream stream) { return is_aligned(x) ? x : contiguous(x, stream); }

Matrices matrices_of(const Tensor& x) {
  Matrices m;
  m.data = x.raw();
  m.row = x.stride(-2);
  for (int64_t d = 0; d + 2 < x.dims(); ++d) m.lead[d] = x.stride(d);
  return m;
}

bool fits(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, const AttentionAttrs& attrs) {
  const int64_t depth = q.size(-1);
  return is_half(q.dtype()) && !mask.defined() && attrs.dropout_p == 0 && depth % 16 == 0 && depth > 0 &&
         depth <= 128 && v.size(-1) == depth && k.elems() > 0 && q.elems() > 0 &&
         q.elems() / (q.size(-2) * depth) <= 65535;
}

FlashCall call_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionAttrs& attrs) {
  FlashCall f;
  f.queries = q.size(-2);
  f.keys = k.size(-2);
  f.causal = attrs.causal ? 1 : 0;
  f.lead_dims = q.dims() - 2;
  for (int64_t d = 0; d < f.lead_dims; ++d) f.lead_sizes[d] = q.size(d);
  if (q.dims() >= 3) f.group = q.size(-3) / k.size(-3);
  f.scale = static_cast<float>(attrs.scale);
  f.q = matrices_of(q);
  f.k = matrices_of(k);
  f.v = matrices_of(v);
  return f;
}

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock); }

CUfunction flash_kernel(Stream stream, const char* name, const Tensor& q) {
  return instance(stream, kFlashCu, name, {q.dtype()}, std::to_string(q.size(-1)).c_str());
}

}  // namespace

bool flash_attention(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AttentionAttrs>();
  if (!fits(args.in[0], args.in[1], args.in[2], args.in[3], attrs) || !is_aligned(args.out[0])) return false;
  const Tensor q = aligned(args.in[0], args.stream), k = aligned(args.in[1], args.stream),
               v = aligned(args.in[2], args.stream);
  FlashCall f = call_of(q, k, v, attrs);
  f.out = matrices_of(args.out[0]);
  f.lse = args.out[1].raw();
  const auto heads = static_cast<unsigned>(q.elems() / (q.size(-2) * q.size(-1)));
  launch(flash_kernel(args.stream, "flash_forward", q), {.x = blocks_of(f.queries), .y = heads, .threads = 128},
         args.stream, f);
  return true;
}

bool flash_attention_backward(const KernelArgs& args) {
  const Stream stream = args.stream;
  const auto& attrs = args.attrs.get<AttentionAttrs>();
  if (!args.in[0].defined() || !fits(args.in[2], args.in[3], args.in[4], args.in[5], attrs)) return false;
  for (const Tensor& gradient : args.out) {
    if (!is_aligned(gradient)) return false;
  }
  const Tensor q = aligned(args.in[2], stream), k = aligned(args.in[3], stream), v = aligned(args.in[4], stream);
  const Tensor dout = aligned(args.in[0], stream), out = aligned(args.in[6], stream);
  const Tensor lse = contiguous(args.in[7], DType::kF32, stream);
  const Tensor dlse = args.in[1].defined() ? contiguous(args.in[1], DType::kF32, stream) : Tensor();
  const Tensor delta = Tensor::empty(lse.sizes(), DType::kF32, stream.device);
  FlashCall f = call_of(q, k, v, attrs);
  f.out = matrices_of(out);
  f.dout = matrices_of(dout);
  f.dq = matrices_of(args.out[0]);
  f.dk = matrices_of(args.out[1]);
  f.dv = matrices_of(args.out[2]);
  f.lse = lse.raw();
  f.delta = delta.raw();
  const int64_t heads = q.elems() / (q.size(-2) * q.size(-1));
  const void* const dlse_raw = dlse.defined() ? dlse.raw() : nullptr;
  launch(flash_kernel(stream, "flash_delta", q),
         {.x = static_cast<unsigned>((heads * f.queries + 3) / 4), .threads = 128}, stream, f, dlse_raw, heads);
  launch(flash_kernel(stream, "flash_backward_queries", q),
         {.x = blocks_of(f.queries), .y = static_cast<unsigned>(heads), .threads = 128}, stream, f);
  launch(flash_kernel(stream, "flash_backward_keys", q),
         {.x = blocks_of(f.keys), .y = static_cast<unsigned>(heads / f.group), .threads = 128}, stream, f);
  return true;
}

}  // namespace chorale::kernel::cuda
