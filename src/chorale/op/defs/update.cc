#include "chorale/op/update.h"

#include <algorithm>

#include "chorale/kernel/cpu/update.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/lists.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale {
namespace op {
namespace {

// ---- lr, found_inf?, parameters, gradients, steps, states, masters?

template <class Rule>
Lists update_lists(const Attrs& attrs) {
  const auto& rule = attrs.get<Rule>();
  Lists lists{.own = 2, .count = 3 + rule.states() + (rule.masters ? 1 : 0)};
  for (size_t l = 0; l < lists.count; ++l) {
    if (l != 1) lists.written.add(lists.own + l);
  }
  return lists;
}

void check_number(const OpDef& op, const char* name, const Tensor& x) {
  CHORALE_CHECK(!x.defined() || (x.dims() == 0 && is_floating(x.dtype())), "[", op.name, "] ", name,
                " is a floating tensor without dimensions, not ", x.dtype(), " ", x.sizes());
}

// What belongs to one parameter. In place its layout must be the parameter's as well: elements are taken in the order
// in which they lie in memory.
struct Fit {
  const OpDef& op;
  size_t place;
  const Tensor& parameter;
  bool in_place;

  void check(const char* name, const Tensor& x, DType dtype, bool any_layout = false) const {
    CHORALE_CHECK(x.sizes() == parameter.sizes() && x.dtype() == dtype, "[", op.name, "] ", name, " ", place, " is ",
                  x.dtype(), " ", x.sizes(), "; expected ", dtype, " ", parameter.sizes(), " as parameter ", place,
                  " (", parameter.dtype(), ")");
    CHORALE_CHECK(any_layout || !in_place || x.strides() == parameter.strides(), "[", op.name, "] ", name, " ", place,
                  " is laid out otherwise than its parameter, with strides ", x.strides(), " and ",
                  parameter.strides());
  }
  // Gradients may be narrower, and laid out otherwise.
  void check_gradient(const Tensor& x) const {
    const bool fits = is_floating(x.dtype()) && promote(x.dtype(), parameter.dtype()) == parameter.dtype();
    check("gradient", x, fits ? x.dtype() : parameter.dtype(), true);
  }
  void check_parameter(bool masters) const {
    CHORALE_CHECK(is_floating(parameter.dtype()) && is_half(parameter.dtype()) == masters, "[", op.name, "] parameter ",
                  place, " is ", parameter.dtype(), "; ",
                  masters ? "masters are for f16 and bf16" : "expected f32 or f64, or masters for f16 and bf16");
    CHORALE_CHECK(!in_place || is_dense(parameter.sizes(), parameter.strides()), "[", op.name, "] parameter ", place,
                  " of shape ", parameter.sizes(), " has holes or overlaps in memory; make it contiguous first");
  }
  void check_number(const char* name, const Tensor& x) const {
    CHORALE_CHECK(x.dims() == 0 && x.dtype() == DType::kF64, "[", op.name, "] ", name, " ", place,
                  " is an f64 tensor without dimensions, not ", x.dtype(), " ", x.sizes());
  }
  void check_step(const Tensor& x) const {
    CHORALE_CHECK(x.dims() == 0 && x.dtype() == DType::kI64, "[", op.name, "] step ", place,
                  " is an i64 tensor without dimensions, not ", x.dtype(), " ", x.sizes());
  }
};

template <class Rule>
void infer_update(const InferArgs& args, std::span<OutSpec> out) {
  const auto& rule = args.attrs.get<Rule>();
  const ListCall call(args.op, args.in, args.attrs);
  check_number(args.op, "lr", args.in[0]);
  check_number(args.op, "found_inf", args.in[1]);
  for (size_t i = 0; i < call.length(); ++i) {
    const Tensor& parameter = call.list(0)[i];
    const Fit fit{args.op, i, parameter, out.empty()};
    const DType compute = compute_of(parameter.dtype());
    fit.check_parameter(rule.masters);
    fit.check_gradient(call.list(1)[i]);
    fit.check_step(call.list(2)[i]);
    const size_t of_shape = rule.states() - (kernel::kLastStateIsNumber<Rule> ? 1 : 0);
    for (size_t s = 0; s < of_shape; ++s) fit.check("state", call.list(3 + s)[i], compute);
    if (kernel::kLastStateIsNumber<Rule>) fit.check_number("state", call.list(3 + of_shape)[i]);
    if (rule.masters) fit.check("master", call.list(3 + rule.states())[i], compute);
  }
  if (!out.empty()) infer_written(call, args.in, out);
}

// Element by element: all but the steps, and states that are numbers, are split alike.
template <class Rule>
void split_update(const ShardCall& call, ShardWays& ways) {
  InputSet alike{0, 1};
  for (size_t l = 3; l < call.op.lists(call.attrs).count; ++l) {
    if (!kernel::kLastStateIsNumber<Rule> || l != 2 + call.attrs.get<Rule>().states()) alike.add(l);
  }
  for (ShardWay& way : split_lists(call, alike)) ways.add(std::move(way.in), std::move(way.out));
}

// Two parameters at different steps. States may stand under a root.
template <class Rule>
std::vector<Tensor> sample_inputs(const Rule& rule, bool skip = false) {
  const Shape sizes[2] = {{3, 4}, {5}};
  std::vector<Tensor> in = {Tensor::scalar(0.05, DType::kF64),
                            skip ? Tensor::scalar(1, DType::kF64) : Tensor::scalar(0, DType::kF64)};
  for (int i = 0; i < 2; ++i) in.push_back(sample(sizes[i], i));
  for (int i = 0; i < 2; ++i) in.push_back(sample(sizes[i], 10 + i));
  for (int64_t i = 0; i < 2; ++i) in.push_back(Tensor::scalar(4 * i, DType::kI64));
  for (size_t s = 0; s < rule.states(); ++s) {
    const bool number = kernel::kLastStateIsNumber<Rule> && s + 1 == rule.states();
    for (int i = 0; i < 2; ++i) in.push_back(number ? sample({}, 30 + i, 0.1, 0.9) : sample(sizes[i], 20 + i, 4, 6));
  }
  return in;
}
template <class Rule>
Sample update_sample(const Rule& rule, bool skip = false) {
  return {.in = sample_inputs(rule, skip), .attrs = rule, .grad = false};
}

template <class Rule>
constexpr OpDef update_row(const char* name, const char* inputs, kernel::Kernel cpu, Samples samples,
                           const char* formula) {
  return {.name = name,
          .inputs = inputs,
          .lists = update_lists<Rule>,
          .attrs = attrs_of<Rule>,
          .dtypes = {DType::kF64},
          .infer = infer_update<Rule>,
          .cpu = cpu,
          .grad = not_differentiable,
          .shard = {.ways = split_update<Rule>},
          .samples = samples,
          .formula = formula};
}

const OpDef kSgd = update_row<SgdRule>(
    "update_sgd", "lr, found_inf?, parameters..., gradients..., steps..., momenta..., masters...",
    kernel::cpu::update_sgd,
    [] {
      return std::vector<Sample>{
          update_sample(SgdRule{.weight_decay = 0.1}),
          update_sample(SgdRule{.momentum = 0.9, .dampening = 0.3}),
          update_sample(SgdRule{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .maximize = true}),
          update_sample(SgdRule{.momentum = 0.9}, /*skip=*/true),
      };
    },
    "g = gradient + weight_decay w; b = momentum b + (1 - dampening) g; w -= lr b");

const OpDef kAdam = update_row<AdamRule>(
    "update_adam", "lr, found_inf?, parameters..., gradients..., steps..., m..., v..., largest_v..., masters...",
    kernel::cpu::update_adam,
    [] {
      return std::vector<Sample>{
          update_sample(AdamRule{.weight_decay = 0.1}),
          update_sample(AdamRule{.weight_decay = 0.1, .decoupled = true, .amsgrad = true, .maximize = true}),
      };
    },
    "m += (1 - beta1) (g - m); v += (1 - beta2) (g² - v); w -= lr m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps)");

const OpDef kAdagrad = update_row<AdagradRule>(
    "update_adagrad", "lr, found_inf?, parameters..., gradients..., steps..., sums..., masters...",
    kernel::cpu::update_adagrad,
    [] { return std::vector<Sample>{update_sample(AdagradRule{.lr_decay = 0.1, .weight_decay = 0.1})}; },
    "s += g²; w -= lr / (1 + (t - 1) lr_decay) g / (√s + eps)");

const OpDef kRmsprop = update_row<RmspropRule>(
    "update_rmsprop", "lr, found_inf?, parameters..., gradients..., steps..., v..., b..., a..., masters...",
    kernel::cpu::update_rmsprop,
    [] {
      return std::vector<Sample>{
          update_sample(RmspropRule{.weight_decay = 0.1}),
          update_sample(RmspropRule{.momentum = 0.7}),
          update_sample(RmspropRule{.alpha = 0.5, .eps = 0.1, .centered = true}),
          update_sample(RmspropRule{.alpha = 0.5, .eps = 0.1, .momentum = 0.7, .centered = true, .maximize = true}),
      };
    },
    "v += (1 - alpha) (g² - v); step = g / (√(v - a²) + eps); b = momentum b + step; w -= lr b");

const OpDef kAdadelta = update_row<AdadeltaRule>(
    "update_adadelta", "lr, found_inf?, parameters..., gradients..., steps..., v..., s..., masters...",
    kernel::cpu::update_adadelta, [] { return std::vector<Sample>{update_sample(AdadeltaRule{.weight_decay = 0.1})}; },
    "v += (1 - rho) (g² - v); u = g √(s + eps) / √(v + eps); s += (1 - rho) (u² - s); w -= lr u");

const OpDef kAdamax = update_row<AdamaxRule>(
    "update_adamax", "lr, found_inf?, parameters..., gradients..., steps..., m..., u..., masters...",
    kernel::cpu::update_adamax,
    [] { return std::vector<Sample>{update_sample(AdamaxRule{.weight_decay = 0.1, .maximize = true})}; },
    "m += (1 - beta1) (g - m); u = max(beta2 u, |g| + eps); w -= lr / (1 - beta1^t) m / u");

const OpDef kNadam = update_row<NadamRule>(
    "update_nadam", "lr, found_inf?, parameters..., gradients..., steps..., m..., v..., products..., masters...",
    kernel::cpu::update_nadam,
    [] {
      return std::vector<Sample>{update_sample(NadamRule{.weight_decay = 0.1}),
                                 update_sample(NadamRule{.weight_decay = 0.1, .decoupled = true})};
    },
    "m, v as update_adam's; µ(t) = beta1 (1 - 0.96^(t momentum_decay) / 2); p = p µ(t); w -= lr ((1 - µ(t)) / (1 - p) "
    "g + "
    "µ(t + 1) / (1 - p µ(t + 1)) m) / (√(v / (1 - beta2^t)) + eps)");

const OpDef kRadam = update_row<RadamRule>(
    "update_radam", "lr, found_inf?, parameters..., gradients..., steps..., m..., v..., masters...",
    kernel::cpu::update_radam,
    [] {
      // The variance is never relied on within five steps of the first sample; in the second it is at step 5.
      return std::vector<Sample>{
          update_sample(RadamRule{.weight_decay = 0.1}),
          update_sample(RadamRule{.beta2 = 0.9, .weight_decay = 0.1, .decoupled = true, .maximize = true})};
    },
    "m, v as update_adam's; w -= lr m / (1 - beta1^t), and once the variance can be relied on, its rectification / √v");

const OpDef kAsgd = update_row<AsgdRule>(
    "update_asgd", "lr, found_inf?, parameters..., gradients..., steps..., averages..., masters...",
    kernel::cpu::update_asgd,
    [] { return std::vector<Sample>{update_sample(AsgdRule{.lambd = 0.1, .t0 = 2, .weight_decay = 0.1})}; },
    "r = lr / (1 + lambd lr (t - 1))^alpha; w = (1 - lambd r) w - r g; a += (w - a) / max(1, t - 1 - t0)");

const OpDef kRprop = update_row<RpropRule>(
    "update_rprop", "lr, found_inf?, parameters..., gradients..., steps..., before..., sizes..., masters...",
    kernel::cpu::update_rprop,
    [] {
      return std::vector<Sample>{update_sample(RpropRule{}),
                                 update_sample(RpropRule{.most_step = 5.5, .maximize = true})};
    },
    "p = g before; s = clamp(s (p > 0 ? grow : p < 0 ? shrink : 1), least_step, most_step); before = p < 0 ? 0 : g; "
    "w -= s sign(before)");

// ---- Lamb: what all rules take, and as results the steps, m, v, masters, Σ w², Σ u²

Lists moments_lists(const Attrs& attrs) {
  Lists lists = update_lists<LambRule>(attrs);
  lists.written = {4, 5, 6};
  if (attrs.get<LambRule>().masters) lists.written.add(7);
  lists.fresh = 2;
  return lists;
}

const OpDef kLambMoments{
    .name = "lamb_moments",
    .inputs = "lr, found_inf?, parameters..., gradients..., steps..., m..., v..., masters...",
    .lists = moments_lists,
    .attrs = attrs_of<LambRule>,
    .dtypes = {DType::kF64},
    .infer = infer_update<LambRule>,
    .cpu = kernel::cpu::lamb_moments,
    .grad = not_differentiable,
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    const InputSet alike = InputSet{0, 1} | InputSet::from(3);
                    for (ShardWay& way : split_lists(call, alike, Reduce::kSum))
                      ways.add(std::move(way.in), std::move(way.out));
                  }},
    .samples = [] { return std::vector<Sample>{update_sample(LambRule{.weight_decay = 0.1})}; },
    .formula =
        "t += 1; m += (1 - beta1) (g - m); v += (1 - beta2) (g² - v); Σ w²; Σ u² with "
        "u = m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps) + weight_decay w",
};

// ---- lr, found_inf?, parameters, steps, m, v, Σ w², Σ u², masters?

Lists apply_lists(const Attrs& attrs) {
  const bool masters = attrs.get<LambRule>().masters;
  Lists lists{.own = 2, .count = masters ? 7u : 6u, .written = {2}};
  if (masters) lists.written.add(8);
  return lists;
}

void infer_apply(const InferArgs& args, std::span<OutSpec> out) {
  const bool masters = args.attrs.get<LambRule>().masters;
  const ListCall call(args.op, args.in, args.attrs);
  check_number(args.op, "lr", args.in[0]);
  check_number(args.op, "found_inf", args.in[1]);
  for (size_t i = 0; i < call.length(); ++i) {
    const Tensor& parameter = call.list(0)[i];
    const Fit fit{args.op, i, parameter, out.empty()};
    const DType compute = compute_of(parameter.dtype());
    fit.check_parameter(masters);
    fit.check_step(call.list(1)[i]);
    for (size_t s = 2; s < 4; ++s) fit.check("state", call.list(s)[i], compute);
    for (size_t s = 4; s < 6; ++s) check_number(args.op, "sum of squares", call.list(s)[i]);
    if (masters) fit.check("master", call.list(6)[i], compute);
  }
  if (!out.empty()) infer_written(call, args.in, out);
}

const OpDef kLambApply{
    .name = "lamb_apply",
    .inputs = "lr, found_inf?, parameters..., steps..., m..., v..., weight_squares..., step_squares..., masters...",
    .lists = apply_lists,
    .attrs = attrs_of<LambRule>,
    .dtypes = {DType::kF64},
    .infer = infer_apply,
    .cpu = kernel::cpu::lamb_apply,
    .grad = not_differentiable,
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    const InputSet alike = InputSet{0, 2, 3} | InputSet::from(6);
                    for (ShardWay& way : split_lists(call, alike)) ways.add(std::move(way.in), std::move(way.out));
                  }},
    .samples =
        [] {
          std::vector<Tensor> in = sample_inputs(LambRule{});
          in.erase(in.begin() + 4, in.begin() + 6);  // no gradients
          for (size_t i = 4; i < 6; ++i) in[i] = Tensor::scalar(3, DType::kI64);
          for (int i = 0; i < 4; ++i) in.push_back(Tensor::scalar(2.0 + i, DType::kF64));
          return std::vector<Sample>{{.in = in, .attrs = LambRule{.weight_decay = 0.1}, .grad = false}};
        },
    .formula = "w -= lr √(Σ w² / Σ u²) u",
};

void append(std::vector<Tensor>& to, const std::vector<Tensor>& list) { to.insert(to.end(), list.begin(), list.end()); }

template <class Rule>
void update(const OpDef& row, const UpdateLists& lists, Rule rule) {
  rule.masters = !lists.masters.empty();
  // Gradients and found_inf live as long as their owner wants them to.
  struct Release {
    const UpdateLists& lists;
    ~Release() {
      lists.last_in[1] = {};
      for (size_t i = 0; i < lists.gradients.size(); ++i) lists.last_in[2 + lists.size() + i] = {};
    }
  };
  size_t written = lists.parameters.size() + lists.steps.size() + lists.masters.size();
  for (size_t s = 0; s < rule.states(); ++s) written += lists.states[s].size();
  const auto fit = [](std::vector<Tensor>& list, size_t size) {
    if (list.size() != size) list.resize(size);
    return list.data();
  };
  Tensor* in = fit(lists.last_in, 2 + written + lists.gradients.size());
  Tensor* out = fit(lists.last_out, written);
  // What stands in its place already is left alone.
  const auto put = [](Tensor*& to, std::span<const Tensor> tensors) {
    for (const Tensor& x : tensors) {
      if (!to->is(x)) *to = x;
      ++to;
    }
  };
  put(in, {&lists.lr, 1});
  put(in, {&lists.found_inf, 1});
  put(in, lists.parameters);
  put(out, lists.parameters);
  put(in, lists.gradients);
  const auto put_written = [&](std::span<const Tensor> tensors) {
    put(in, tensors);
    put(out, tensors);
  };
  put_written(lists.steps);
  for (size_t s = 0; s < rule.states(); ++s) put_written(lists.states[s]);
  put_written(lists.masters);
  const Release release{lists};
  current().call_into(row, lists.last_in, rule, lists.last_out);
}

}  // namespace

bool reads_gradients(const OpDef& row) {
  const Rows rows = update_rows();
  return &row != &kLambApply && std::find(rows.begin(), rows.end(), &row) != rows.end();
}

Rows update_rows() {
  static constexpr const OpDef* rows[] = {&kSgd,   &kAdam,  &kAdagrad, &kRmsprop, &kAdadelta,    &kAdamax,
                                          &kNadam, &kRadam, &kAsgd,    &kRprop,   &kLambMoments, &kLambApply};
  return rows;
}

}  // namespace op

void sgd_(const UpdateLists& lists, SgdRule rule) { op::update(op::kSgd, lists, rule); }
void adam_(const UpdateLists& lists, AdamRule rule) { op::update(op::kAdam, lists, rule); }
void adagrad_(const UpdateLists& lists, AdagradRule rule) { op::update(op::kAdagrad, lists, rule); }
void rmsprop_(const UpdateLists& lists, RmspropRule rule) { op::update(op::kRmsprop, lists, rule); }
void adadelta_(const UpdateLists& lists, AdadeltaRule rule) { op::update(op::kAdadelta, lists, rule); }
void adamax_(const UpdateLists& lists, AdamaxRule rule) { op::update(op::kAdamax, lists, rule); }
void nadam_(const UpdateLists& lists, NadamRule rule) { op::update(op::kNadam, lists, rule); }
void radam_(const UpdateLists& lists, RadamRule rule) { op::update(op::kRadam, lists, rule); }
void asgd_(const UpdateLists& lists, AsgdRule rule) { op::update(op::kAsgd, lists, rule); }
void rprop_(const UpdateLists& lists, RpropRule rule) { op::update(op::kRprop, lists, rule); }

void lamb_(const UpdateLists& lists, LambRule rule) {
  rule.masters = !lists.masters.empty();
  const size_t n = lists.size();
  std::vector<Tensor> in{lists.lr, lists.found_inf}, out, sums;
  for (const auto* list :
       {&lists.parameters, &lists.gradients, &lists.steps, &lists.states[0], &lists.states[1], &lists.masters})
    op::append(in, *list);
  for (const auto* list : {&lists.steps, &lists.states[0], &lists.states[1], &lists.masters}) op::append(out, *list);
  for (size_t i = 0; i < 2 * n; ++i) sums.push_back(Tensor::empty({}, DType::kF64, lists.lr.device()));
  op::append(out, sums);
  op::current().call_into(op::kLambMoments, in, rule, out);

  in = {lists.lr, lists.found_inf};
  for (const auto* list :
       {&lists.parameters, &lists.steps, &lists.states[0], &lists.states[1], &std::as_const(sums), &lists.masters})
    op::append(in, *list);
  out = lists.parameters;
  op::append(out, lists.masters);
  op::current().call_into(op::kLambApply, in, rule, out);
}

}  // namespace chorale
