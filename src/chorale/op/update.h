// Updates of parameters, clipping and loss scaling: ops over lists of tensors that write into them, so that a step can
// be recorded, sharded and run on another device. Optimizers (optim/) call these. What changes from step to step is
// read from tensors when the op runs: rates and scales from f64 and f32 tensors without dimensions, counts of steps
// from i64 ones. They are not differentiable: call them inside a NoGrad scope.
#pragma once

#include <array>
#include <vector>

#include "chorale/kernel/update_attrs.h"
#include "chorale/op/op_def.h"

namespace chorale {

using kernel::AdadeltaRule;
using kernel::AdagradRule;
using kernel::AdamaxRule;
using kernel::AdamRule;
using kernel::AsgdRule;
using kernel::LambRule;
using kernel::NadamRule;
using kernel::RadamRule;
using kernel::RmspropRule;
using kernel::RpropRule;
using kernel::SgdRule;

// What an update reads and writes: lists of one length. Parameter, gradient, states and master at one place belong
// together and have one shape; states and masters have the parameter's layout, and the dtype in which it is computed
// with (f32 for the 16-bit types). Parameters have no holes in memory.
struct UpdateLists {
  static constexpr size_t kMaxStates = 3;

  std::vector<Tensor> parameters, gradients;
  std::vector<Tensor> steps;  // i64: updates so far; each update counts one
  std::array<std::vector<Tensor>, kMaxStates> states;
  // Copies in f32 of parameters that are f16 or bf16. A master that does not round to its parameter was overtaken by a
  // write to the parameter, and is taken from there. Either all parameters are of these types or none.
  std::vector<Tensor> masters;
  Tensor lr;
  Tensor found_inf;  // where it is defined and not 0, nothing is written
  // Inputs and results of the last call, but for its gradients and found_inf. The next call mostly has the same ones,
  // and need not count references to them again: of small parameters that would be a good part of the time.
  mutable std::vector<Tensor> last_in, last_out;

  size_t size() const { return parameters.size(); }
};

namespace op {
// Whether it is one of the rows below that read gradients: its second list. They may be narrower than the parameters
// are.
bool reads_gradients(const OpDef& row);
}  // namespace op

// w are parameters, g gradients plus weight_decay * w (maximize: minus the gradients), t the step, from 1.
//
// b = momentum * b + (1 - dampening) * g, at first g; w -= lr * b, or with nesterov lr * (g + momentum * b). Without
// momentum w -= lr * g, and there are no states. states: b
void sgd_(const UpdateLists& lists, SgdRule rule);
// m += (1 - beta1) * (g - m); v += (1 - beta2) * (g² - v); w -= lr * m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps).
// amsgrad: the largest v so far. decoupled: weight decay is w *= 1 - lr * weight_decay instead. states: m, v, largest v
void adam_(const UpdateLists& lists, AdamRule rule);
// s += g²; w -= lr / (1 + (t - 1) * lr_decay) * g / (√s + eps). states: s
void adagrad_(const UpdateLists& lists, AdagradRule rule);
// v += (1 - alpha) * (g² - v); step = g / (√v + eps); w -= lr * step. centered: a += (1 - alpha) * (g - a), and v - a²
// under the root. momentum: b = momentum * b + step, w -= lr * b. states: v, b, a, those that there are
void rmsprop_(const UpdateLists& lists, RmspropRule rule);
// Adam's m and v; u = m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps) + weight_decay * w, where g has no weight decay;
// w -= lr * |w| / |u| * u, or lr * u where a norm is 0. states: m, v
void lamb_(const UpdateLists& lists, LambRule rule);
// v += (1 - rho) * (g² - v); u = g * √(s + eps) / √(v + eps); s += (1 - rho) * (u² - s); w -= lr * u. states: v, s
void adadelta_(const UpdateLists& lists, AdadeltaRule rule);
// m as Adam's; u = max(beta2 * u, |g| + eps); w -= lr / (1 - beta1^t) * m / u. states: m, u
void adamax_(const UpdateLists& lists, AdamaxRule rule);
// Adam with Nesterov's momentum, m and v as there: µ(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2), product of all µ
// so far p; w -= lr * ((1 - µ(t)) / (1 - p) * g + µ(t + 1) / (1 - p * µ(t + 1)) * m) / (√(v / (1 - beta2^t)) + eps).
// states: m, v, and p, one f64 number for each parameter that begins with 1
void nadam_(const UpdateLists& lists, NadamRule rule);
// Adam, m and v as there, without the division by √v while too few steps are known to rely on it. states: m, v
void radam_(const UpdateLists& lists, RadamRule rule);
// r = lr / (1 + lambd * lr * (t - 1))^alpha; w = (1 - lambd * r) * w - r * g; a is the average of w since step t0, and
// w itself before. states: a
void asgd_(const UpdateLists& lists, AsgdRule rule);
// Only the sign of g counts, which has no weight decay: s *= grow where it has not changed, shrink where it has, within
// [least_step, most_step]; w -= s * sign(g), but an element whose sign has changed waits for one step, and then goes on
// as at first. lr is not read. states: g before, and s, which begins with the rate
void rprop_(const UpdateLists& lists, RpropRule rule);

// The p-norm of all elements of all tensors together, p > 0 or infinity: f64, without dimensions.
Tensor norm_of_all(std::span<const Tensor> tensors, double p = 2);
// Scales all of them by max_norm / (norm + 1e-6) where that is below 1 and the norm finite.
void clip_by_norm_(std::span<const Tensor> tensors, const Tensor& norm, double max_norm);
// Limits every element to [-limit, limit].
void clip_by_value_(std::span<const Tensor> tensors, double limit);

// Divides all of them by `scale`, and sets found_inf (f32) to 1 if an element was infinite or NaN.
void unscale_(std::span<const Tensor> tensors, const Tensor& scale, const Tensor& found_inf);
// The scale (f32) after a step: times `backoff` if found_inf is not 0, times `growth` after `interval` others in a row,
// which `steps` (i64) counts.
void next_loss_scale_(const Tensor& scale, const Tensor& steps, const Tensor& found_inf,
                      const kernel::LossScaleAttrs& attrs);

}  // namespace chorale
