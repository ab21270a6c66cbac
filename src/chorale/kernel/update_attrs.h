// Constants of the rows that update parameters, clip gradients and scale losses. What changes from step to step (the
// learning rate, counts of steps, the scale) is no attribute but a tensor, so that a step can be recorded and replayed.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// A rule over lists of parameters, gradients, steps and states (op/update.h). `maximize` goes up instead of down;
// `masters`: the parameters are of a 16-bit type and have copies in f32, the last list. states() says how many lists of
// states there are.
struct SgdRule {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return momentum != 0 ? 1 : 0; }
};
CHORALE_FIELDS(SgdRule, momentum, dampening, weight_decay, nesterov, maximize, masters)

struct AdamRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;  // AdamW: weight decay shrinks the weights and is no part of the gradient
  bool amsgrad = false;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return amsgrad ? 3 : 2; }
};
CHORALE_FIELDS(AdamRule, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, masters)

struct AdagradRule {
  double lr_decay = 0;
  double weight_decay = 0;
  double eps = 1e-10;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 1; }
};
CHORALE_FIELDS(AdagradRule, lr_decay, weight_decay, eps, maximize, masters)

// States: the average square, then the momentum and the average, where there are such.
struct RmspropRule {
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 1 + (momentum != 0 ? 1 : 0) + (centered ? 1 : 0); }
};
CHORALE_FIELDS(RmspropRule, alpha, eps, weight_decay, momentum, centered, maximize, masters)

struct LambRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 2; }
};
CHORALE_FIELDS(LambRule, beta1, beta2, eps, weight_decay, maximize, masters)

struct AdadeltaRule {
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 2; }
};
CHORALE_FIELDS(AdadeltaRule, rho, eps, weight_decay, maximize, masters)

struct AdamaxRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 2; }
};
CHORALE_FIELDS(AdamaxRule, beta1, beta2, eps, weight_decay, maximize, masters)

// The last state is one number for each parameter: the product of all momenta so far.
struct NadamRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum_decay = 4e-3;
  bool decoupled = false;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 3; }
};
CHORALE_FIELDS(NadamRule, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize, masters)

struct RadamRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 2; }
};
CHORALE_FIELDS(RadamRule, beta1, beta2, eps, weight_decay, decoupled, maximize, masters)

struct AsgdRule {
  double lambd = 1e-4;
  double alpha = 0.75;
  double t0 = 1e6;
  double weight_decay = 0;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 1; }
};
CHORALE_FIELDS(AsgdRule, lambd, alpha, t0, weight_decay, maximize, masters)

// States: the gradient before, 0 where its sign had changed, and the step of each element, which begins with the
// learning rate; the rate itself is not read.
struct RpropRule {
  double shrink = 0.5;
  double grow = 1.2;
  double least_step = 1e-6;
  double most_step = 50;
  bool maximize = false;
  bool masters = false;

  size_t states() const { return 2; }
};
CHORALE_FIELDS(RpropRule, shrink, grow, least_step, most_step, maximize, masters)

// Whether the last state of a rule is one f64 number for each parameter instead of one for each element.
template <class Rule>
inline constexpr bool kLastStateIsNumber = std::is_same_v<Rule, NadamRule>;

// |x|^p is summed; infinity: the largest |x|.
struct PowerAttrs {
  double p = 2;
};
CHORALE_FIELDS(PowerAttrs, p)

struct ClipNormAttrs {
  double max_norm = 1;
};
CHORALE_FIELDS(ClipNormAttrs, max_norm)

struct ClipValueAttrs {
  double limit = 1;
};
CHORALE_FIELDS(ClipValueAttrs, limit)

struct LossScaleAttrs {
  double growth = 2;
  double backoff = 0.5;
  int64_t interval = 2000;
};
CHORALE_FIELDS(LossScaleAttrs, growth, backoff, interval)

}  // namespace chorale::kernel
