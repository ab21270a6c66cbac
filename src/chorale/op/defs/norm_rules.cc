#include "chorale/op/defs/norm_rules.h"

#include "chorale/op/reduce.h"
#include "chorale/op/view.h"

namespace chorale::op {

NormGradient differentiate(const NormGradient& of, const Tensor& v, const Tensor& v_weight, const Tensor& v_bias) {
  const auto& [dy, x, mean_x, rstd, weight, dims] = of;
  const auto avg = [&](const Tensor& t) { return mean(t, of.dims, true); };
  const Tensor centered = mean_x.defined() ? x - mean_x : x;
  const Tensor z = centered * rstd;
  const Tensor g = weight.defined() ? dy * weight : dy;
  NormGradient d;
  Tensor dz;
  if (v.defined()) {
    const Tensor v_z = avg(v * z), g_z = avg(g * z);
    // The map g -> dx is symmetric.
    Tensor dx_of_v = v - z * v_z, dx = g - z * g_z;
    if (mean_x.defined()) {
      dx_of_v = dx_of_v - avg(v);
      dx = dx - avg(g);
    }
    const Tensor dg = dx_of_v * rstd;
    d.dy = weight.defined() ? dg * weight : dg;
    if (weight.defined()) d.weight = dg * dy;
    dz = -(v * g_z + g * v_z) * rstd;
    d.rstd = sum(v * dx, dims, true);
  }
  if (v_weight.defined()) {
    d.dy = plus(d.dy, v_weight * z);
    dz = plus(dz, v_weight * dy);
  }
  if (v_bias.defined()) d.dy = plus(d.dy, expand_as(v_bias, dy));
  if (dz.defined()) {
    d.x = dz * rstd;
    if (mean_x.defined()) d.mean = -sum(d.x, dims, true);
    d.rstd = plus(d.rstd, sum(dz * centered, dims, true));
  }
  return d;
}

}  // namespace chorale::op
