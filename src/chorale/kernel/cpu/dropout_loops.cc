#include "chorale/kernel/cpu/dropout_loops.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/dropout_loops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/kernel/cpu/support/for_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {

void drop_f32(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<uint32_t> du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto bound = hn::Set(du, threshold);
  const auto factor = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto word = hn::LoadU(du, words + i);
    const auto kept = hn::RebindMask(d, hn::Eq(hn::Max(word, bound), word));
    hn::StoreU(hn::IfThenElseZero(kept, hn::Mul(hn::LoadU(d, x + i), factor)), d, y + i);
  }
  for (; i < n; ++i) y[i] = words[i] < threshold ? 0.0f : x[i] * scale;
}

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

HWY_EXPORT(drop_f32);

void drop_row(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(drop_f32)(x, words, threshold, scale, y, n);
}
void drop_row(const double* x, const uint32_t* words, uint32_t threshold, double scale, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = words[i] < threshold ? 0.0 : x[i] * scale;
}

}  // namespace chorale::kernel::cpu
#endif
