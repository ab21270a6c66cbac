#include "chorale/kernel/cpu/update.h"

#include <algorithm>
#include <cmath>

#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/update_lists.h"
#include "chorale/kernel/update_attrs.h"
#include "chorale/vec/update.h"

namespace chorale::kernel::cpu {
namespace {

// Fewer elements are not worth waking a thread for: it takes some microseconds, and an element one nanosecond at most.
constexpr int64_t kUpdateGrainElems = 32768;
constexpr size_t kMaxStates = 3;

// How one update goes, the number `step` (from 1) of its parameter.
struct Recipe {
  vec::UpdateRule rule;
  vec::UpdateParams params;
  // The place of each list of states among those of the rule (vec::UpdateSpan::state).
  size_t places[kMaxStates] = {0, 1, 2};
};

Recipe recipe(const SgdRule& o, double lr, int64_t step) {
  Recipe r;
  r.rule = o.nesterov        ? vec::UpdateRule::kSgdNesterov
           : o.momentum != 0 ? vec::UpdateRule::kSgdMomentum
                             : vec::UpdateRule::kSgd;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr;
  r.params.decay1 = o.momentum;
  r.params.gain1 = step == 1 ? 1 : 1 - o.dampening;  // the first momentum is the gradient itself
  return r;
}

// decay^step. Parameters that are updated one by one, inside of backward, ask for the same powers again, and a power
// takes a third of the time of a small update.
double power(double decay, double step) {
  struct Known {
    double decay, step, value;
  };
  thread_local Known known[2] = {};  // steps begin at 1, so nothing is known yet
  for (const Known& k : known) {
    if (k.decay == decay && k.step == step) return k.value;
  }
  known[1] = known[0];
  known[0] = {decay, step, std::pow(decay, step)};
  return known[0].value;
}

Recipe recipe(const AdamRule& o, double lr, int64_t step) {
  const auto t = static_cast<double>(step);
  Recipe r;
  r.rule = o.amsgrad ? vec::UpdateRule::kAmsgrad : vec::UpdateRule::kAdam;
  (o.decoupled ? r.params.keep : r.params.weight_decay) = o.decoupled ? 1 - lr * o.weight_decay : o.weight_decay;
  r.params.rate = lr / (1 - power(o.beta1, t));
  r.params.gain1 = 1 - o.beta1;
  r.params.decay2 = o.beta2;
  r.params.gain2 = 1 - o.beta2;
  r.params.root_scale = 1 / std::sqrt(1 - power(o.beta2, t));
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const AdagradRule& o, double lr, int64_t step) {
  Recipe r;
  r.rule = vec::UpdateRule::kAdagrad;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr / (1 + static_cast<double>(step - 1) * o.lr_decay);
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const RmspropRule& o, double lr, int64_t) {
  using Rule = vec::UpdateRule;
  Recipe r;
  r.rule = o.momentum != 0 ? (o.centered ? Rule::kRmspropCenteredMomentum : Rule::kRmspropMomentum)
                           : (o.centered ? Rule::kRmspropCentered : Rule::kRmsprop);
  if (o.momentum == 0) r.places[1] = 2;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr;
  r.params.decay1 = o.momentum;
  r.params.decay2 = o.alpha;
  r.params.gain2 = 1 - o.alpha;
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const LambRule& o, double lr, int64_t step) {
  const auto t = static_cast<double>(step);
  Recipe r;
  r.rule = vec::UpdateRule::kLambMoments;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr;
  r.params.gain1 = 1 - o.beta1;
  r.params.decay2 = o.beta2;
  r.params.gain2 = 1 - o.beta2;
  r.params.scale1 = 1 / (1 - power(o.beta1, t));
  r.params.root_scale = 1 / std::sqrt(1 - power(o.beta2, t));
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const AdadeltaRule& o, double lr, int64_t) {
  Recipe r;
  r.rule = vec::UpdateRule::kAdadelta;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr;
  r.params.decay2 = o.rho;
  r.params.gain2 = 1 - o.rho;
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const AdamaxRule& o, double lr, int64_t step) {
  Recipe r;
  r.rule = vec::UpdateRule::kAdamax;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr / (1 - power(o.beta1, static_cast<double>(step)));
  r.params.gain1 = 1 - o.beta1;
  r.params.decay2 = o.beta2;
  r.params.eps = o.eps;
  return r;
}

Recipe recipe(const RpropRule& o, double, int64_t) {
  Recipe r;
  r.rule = vec::UpdateRule::kRprop;
  r.params.decay1 = o.shrink;
  r.params.gain1 = o.grow;
  r.params.eps = o.least_step;
  r.params.scale1 = o.most_step;
  return r;
}

// The momentum of a step: it rises towards beta1.
double momentum_at(const NadamRule& o, int64_t step) {
  return o.beta1 * (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * o.momentum_decay));
}
// `product` is that of the momenta of all steps, this one included.
Recipe recipe(const NadamRule& o, double lr, int64_t step, double product) {
  const double momentum = momentum_at(o, step), next = momentum_at(o, step + 1);
  Recipe r;
  r.rule = vec::UpdateRule::kNadam;
  (o.decoupled ? r.params.keep : r.params.weight_decay) = o.decoupled ? 1 - lr * o.weight_decay : o.weight_decay;
  r.params.rate = lr * (1 - momentum) / (1 - product);
  r.params.scale1 = lr * next / (1 - product * next);
  r.params.gain1 = 1 - o.beta1;
  r.params.decay2 = o.beta2;
  r.params.gain2 = 1 - o.beta2;
  r.params.root_scale = 1 / std::sqrt(1 - power(o.beta2, static_cast<double>(step)));
  r.params.eps = o.eps;
  return r;
}

// The variance of the first few steps is not known well enough to divide by; later its uncertainty scales the rate.
Recipe recipe(const RadamRule& o, double lr, int64_t step) {
  const auto t = static_cast<double>(step);
  const double correction1 = 1 - power(o.beta1, t), correction2 = 1 - power(o.beta2, t);
  const double longest = 2 / (1 - o.beta2) - 1, length = longest - 2 * t * (1 - correction2) / correction2;
  Recipe r;
  r.rule = vec::UpdateRule::kMomentsOnly;
  (o.decoupled ? r.params.keep : r.params.weight_decay) = o.decoupled ? 1 - lr * o.weight_decay : o.weight_decay;
  r.params.rate = lr / correction1;
  r.params.gain1 = 1 - o.beta1;
  r.params.decay2 = o.beta2;
  r.params.gain2 = 1 - o.beta2;
  r.params.eps = o.eps;
  if (length > 5) {
    r.rule = vec::UpdateRule::kAdam;
    r.params.rate *=
        std::sqrt(correction2 * (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
  }
  return r;
}

Recipe recipe(const AsgdRule& o, double lr, int64_t step) {
  const auto before = static_cast<double>(step - 1);
  Recipe r;
  r.rule = vec::UpdateRule::kAsgd;
  r.params.weight_decay = o.weight_decay;
  r.params.rate = lr / std::pow(1 + o.lambd * lr * before, o.alpha);
  r.params.keep = 1 - o.lambd * r.params.rate;
  r.params.gain1 = 1 / std::max(1.0, before - o.t0);
  return r;
}

// Parameters are mostly at the same step, and share their recipe then.
template <class Rule>
class Recipes {
 public:
  Recipes(const Rule& rule, double lr) : rule_(rule), lr_(lr) {}

  // The number of the recipe for this step, and for a state that is a number.
  template <class... Number>
  size_t at(int64_t step, Number... state) {
    if (recipes_.empty() || last_ != step || (false || ... || (state != state_))) {
      recipes_.push_back(recipe(rule_, lr_, step, state...));
      recipes_.back().params.sign = rule_.maximize ? -1 : 1;
      last_ = step;
      ((state_ = state), ...);
    }
    return recipes_.size() - 1;
  }
  const Recipe& operator[](size_t i) const { return recipes_[i]; }

 private:
  const Rule& rule_;
  double lr_;
  int64_t last_ = 0;
  double state_ = 0;
  SmallVector<Recipe, 1> recipes_;
};

// One parameter and what belongs to it.
struct Job {
  vec::UpdateSpan span;
  DType dtype;
  size_t recipe;
  int64_t begin;  // elements of all jobs before it
};

void* advance(const void* pointer, int64_t elems, DType dtype) {
  if (!pointer) return nullptr;
  return const_cast<std::byte*>(static_cast<const std::byte*>(pointer)) + elems * static_cast<int64_t>(size_of(dtype));
}

// Elements [begin, begin + n) of a job.
vec::UpdateSpan piece_of(const Job& job, int64_t begin, int64_t n) {
  vec::UpdateSpan piece = job.span;
  const DType compute = compute_of(job.dtype);
  piece.weight = advance(piece.weight, begin, compute);
  piece.rounded = advance(piece.rounded, begin, job.dtype);
  piece.gradient = advance(piece.gradient, begin, job.dtype);
  for (void*& state : piece.state) state = advance(state, begin, compute);
  piece.n = n;
  return piece;
}

Job job_of(const Tensor& parameter, const Tensor* master) {
  Job job{};
  job.span.weight = master ? master->raw() : parameter.raw();
  job.span.rounded = master ? parameter.raw() : nullptr;
  job.span.n = parameter.elems();
  job.dtype = parameter.dtype();
  return job;
}

bool found_inf(const Tensor& flag) { return flag.defined() && number_in(flag) != 0; }

template <class Rule>
void update(const KernelArgs& args) {
  const auto& rule = args.attrs.get<Rule>();
  const size_t states = rule.states(), lists = 3 + states + (rule.masters ? 1 : 0);
  const size_t n = (args.in.size() - 2) / lists;
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  // Among the results there are no gradients: list 1 is that of the steps.
  const auto out = [&](size_t list) { return args.out.subspan(list * n, n); };
  for (size_t l = 0; l < lists; ++l) {
    if (l != 1) start_from(in(l), out(l == 0 ? 0 : l - 1));
  }
  if (found_inf(args.in[1])) return;

  Recipes<Rule> recipes(rule, number_in(args.in[0]));
  SmallVector<Job, 4> jobs;  // small models are updated in the time of a few allocations
  std::vector<Tensor> kept;  // gradients that had to be laid out anew
  jobs.reserve(n);
  int64_t elems = 0;
  for (size_t i = 0; i < n; ++i) {
    const Tensor& parameter = out(0)[i];
    Job job = job_of(parameter, rule.masters ? &out(2 + states)[i] : nullptr);
    const int64_t step = ++*out(1)[i].template data<int64_t>();
    if constexpr (kLastStateIsNumber<Rule>) {
      job.recipe = recipes.at(step, *out(1 + states)[i].template data<double>() *= momentum_at(rule, step));
    } else {
      job.recipe = recipes.at(step);
    }
    for (size_t s = 0; s < states - (kLastStateIsNumber<Rule> ? 1 : 0); ++s)
      job.span.state[recipes[job.recipe].places[s]] = out(2 + s)[i].raw();
    const Tensor& gradient = in(1)[i];
    if (is_laid_out_as(gradient, parameter) && gradient.dtype() == parameter.dtype()) {
      job.span.gradient = gradient.raw();
    } else {
      kept.push_back(laid_out_as(gradient, parameter, parameter.dtype()));
      job.span.gradient = kept.back().raw();
    }
    job.begin = elems;
    elems += job.span.n;
    jobs.push_back(job);
  }
  parallel_for(elems, kUpdateGrainElems, [&](int64_t begin, int64_t end) {
    auto job =
        std::upper_bound(jobs.begin(), jobs.end(), begin, [](int64_t at, const Job& j) { return at < j.begin; }) - 1;
    for (; job != jobs.end() && job->begin < end; ++job) {
      const Recipe& recipe = recipes[job->recipe];
      const int64_t first = std::max<int64_t>(begin - job->begin, 0);
      const int64_t count = std::min(end - job->begin, job->span.n) - first;
      vec::update_loop(recipe.rule, job->dtype)(piece_of(*job, first, count), recipe.params);
    }
  });
}

}  // namespace

void update_sgd(const KernelArgs& args) { update<SgdRule>(args); }
void update_adam(const KernelArgs& args) { update<AdamRule>(args); }
void update_adagrad(const KernelArgs& args) { update<AdagradRule>(args); }
void update_rmsprop(const KernelArgs& args) { update<RmspropRule>(args); }
void update_adadelta(const KernelArgs& args) { update<AdadeltaRule>(args); }
void update_adamax(const KernelArgs& args) { update<AdamaxRule>(args); }
void update_nadam(const KernelArgs& args) { update<NadamRule>(args); }
void update_radam(const KernelArgs& args) { update<RadamRule>(args); }
void update_asgd(const KernelArgs& args) { update<AsgdRule>(args); }
void update_rprop(const KernelArgs& args) { update<RpropRule>(args); }

void lamb_moments(const KernelArgs& args) {
  const auto& rule = args.attrs.get<LambRule>();
  const size_t n = (args.in.size() - 2) / (5 + (rule.masters ? 1 : 0));
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  const auto out = [&](size_t list) { return args.out.subspan(list * n, n); };
  const std::span<const Tensor> parameters = in(0), steps = out(0), first = out(1), second = out(2);
  const size_t sums = rule.masters ? 4 : 3;
  for (size_t l = 0; l < sums; ++l) start_from(in(2 + l), out(l));
  for (size_t i = 0; i < n; ++i) *out(sums)[i].data<double>() = *out(sums + 1)[i].data<double>() = 0;
  if (found_inf(args.in[1])) return;

  Recipes<LambRule> recipes(rule, 0);
  std::vector<Job> jobs;
  std::vector<Tensor> kept;
  for (size_t i = 0; i < n; ++i) {
    // Weights are only read here, unless a master has to follow its parameter.
    kept.push_back(laid_out_as(parameters[i], first[i]));
    Job job = job_of(kept.back(), rule.masters ? &out(3)[i] : nullptr);
    kept.push_back(laid_out_as(in(1)[i], first[i], parameters[i].dtype()));
    job.span.gradient = kept.back().raw();
    job.span.state[0] = first[i].raw();
    job.span.state[1] = second[i].raw();
    job.recipe = recipes.at(++*steps[i].data<int64_t>());
    jobs.push_back(job);
  }
  const std::vector<Piece> pieces = pieces_of(parameters);
  std::vector<std::array<double, 2>> parts(pieces.size());
  for_each_piece(pieces, [&](const Piece& s, size_t i) {
    const Job& job = jobs[s.tensor];
    vec::UpdateSpan span = piece_of(job, s.begin, s.n);
    span.sums = parts[i].data();
    vec::update_loop(vec::UpdateRule::kLambMoments, job.dtype)(span, recipes[job.recipe].params);
  });
  for (size_t i = 0; i < pieces.size(); ++i) {
    *out(sums)[pieces[i].tensor].data<double>() += parts[i][0];
    *out(sums + 1)[pieces[i].tensor].data<double>() += parts[i][1];
  }
}

void lamb_apply(const KernelArgs& args) {
  const auto& rule = args.attrs.get<LambRule>();
  const size_t n = (args.in.size() - 2) / (6 + (rule.masters ? 1 : 0));
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  const auto parameters = args.out.first(n), masters = args.out.subspan(n);
  start_from(in(0), parameters);
  if (rule.masters) start_from(in(6), masters);
  if (found_inf(args.in[1])) return;

  Recipes<LambRule> recipes(rule, number_in(args.in[0]));
  std::vector<Job> jobs;
  std::vector<double> rates;
  std::vector<Tensor> kept;
  for (size_t i = 0; i < n; ++i) {
    Job job = job_of(parameters[i], rule.masters ? &masters[i] : nullptr);
    for (size_t s = 0; s < 2; ++s) {
      kept.push_back(laid_out_as(in(2 + s)[i], parameters[i]));
      job.span.state[s] = kept.back().raw();
    }
    job.recipe = recipes.at(*in(1)[i].data<int64_t>());
    const double weight = number_in(in(4)[i]), step = number_in(in(5)[i]);
    rates.push_back(recipes[job.recipe].params.rate * (weight > 0 && step > 0 ? std::sqrt(weight / step) : 1));
    jobs.push_back(job);
  }
  for_each_piece(pieces_of(parameters), [&](const Piece& s, size_t) {
    const Job& job = jobs[s.tensor];
    vec::UpdateParams params = recipes[job.recipe].params;
    params.rate = rates[s.tensor];
    vec::update_loop(vec::UpdateRule::kLambApply, job.dtype)(piece_of(job, s.begin, s.n), params);
  });
}

}  // namespace chorale::kernel::cpu
