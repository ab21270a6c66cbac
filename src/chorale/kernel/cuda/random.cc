#include "chorale/kernel/cuda/random.h"

#include <algorithm>
#include <cmath>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/random_attrs.h"

namespace chorale::cuda {
extern const std::string_view kRandomCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kRandomCu;

void draw_real(const KernelArgs& args, const char* name) {
  const auto& a = args.attrs.get<RandomAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  launch(instance(args.stream, kRandomCu, name, {out.dtype()}), {.x = blocks_for(args.stream.device, out.elems())},
         args.stream, out.raw(), out.elems(), drawn_for(args.in[0], out.sizes()), a.a, a.b);
}

}  // namespace

void uniform(const KernelArgs& args) { draw_real(args, "uniform"); }
void normal(const KernelArgs& args) { draw_real(args, "normal"); }

void randint(const KernelArgs& args) {
  const auto& a = args.attrs.get<RandintAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const uint64_t range = static_cast<uint64_t>(a.high) - static_cast<uint64_t>(a.low);
  launch(instance(args.stream, kRandomCu, "random_integer", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, out.raw(), out.elems(),
         drawn_for(args.in[0], out.sizes()), a.low, range);
}

void bernoulli(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor p = contiguous(args.in[0], args.stream);
  launch(instance(args.stream, kRandomCu, "bernoulli", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, p.raw(), out.raw(), out.elems(),
         drawn_for(args.in[1], out.sizes()), fault_of(args.stream.device), row_number(args));
}

void dropout(const KernelArgs& args) {
  const auto& a = args.attrs.get<DropoutAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0], args.stream);
  const auto threshold = static_cast<uint32_t>(std::min(std::nearbyint(a.p * 0x1p32), 0x1p32 - 1));
  const double scale = a.p < 1 ? 1 / (1 - a.p) : 0;
  launch(instance(args.stream, kRandomCu, "dropout", {out.dtype()}), {.x = blocks_for(args.stream.device, out.elems())},
         args.stream, x.raw(), out.raw(), out.elems(), drawn_for(args.in[1], out.sizes()), threshold, scale);
}

}  // namespace chorale::kernel::cuda
