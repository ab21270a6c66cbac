#include "chorale/kernel/cuda/scan.h"

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::cuda {
extern const std::string_view kScanCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kScanCu;

// What kernels see (scan.cu).
struct Scan {
  int64_t lines, length, inner;
  int64_t reverse, exclusive;
};
Scan scan_of(const char* op, const Tensor& x, const ScanAttrs& attrs) {
  const Around a = around(x.sizes(), normalize_dim(op, attrs.dim, x.dims()));
  return {a.lines(), a.length, a.inner, int64_t{attrs.reverse}, int64_t{attrs.exclusive}};
}
// A running value is kept in more digits than its results have, as on the CPU.
const char* state_in_text(DType dtype) {
  if (dtype == DType::kI64) return "i64";
  return is_half(dtype) ? "float" : "double";
}

void scan_with(const char* op, const KernelArgs& args, bool product) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0], out.dtype(), args.stream);
  const Scan scan = scan_of(op, x, args.attrs.get<ScanAttrs>());
  const std::string more = concat(state_in_text(out.dtype()), product ? ", true" : ", false");
  launch(instance(args.stream, kScanCu, "scan", {out.dtype()}, more.c_str()),
         {.x = blocks_for(args.stream.device, scan.lines * 32)}, args.stream, x.raw(), out.raw(), scan);
}

}  // namespace

void cumsum(const KernelArgs& args) { scan_with("cumsum", args, false); }
void cumprod(const KernelArgs& args) { scan_with("cumprod", args, true); }

void recurrence(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor a = contiguous(args.in[0], out.dtype(), args.stream),
               b = contiguous(args.in[1], out.dtype(), args.stream);
  const Scan scan = scan_of("recurrence", a, args.attrs.get<ScanAttrs>());
  launch(instance(args.stream, kScanCu, "recurrence", {out.dtype()}, state_in_text(out.dtype())),
         {.x = blocks_for(args.stream.device, scan.lines)}, args.stream, a.raw(), b.raw(), out.raw(), scan);
}

}  // namespace chorale::kernel::cuda
