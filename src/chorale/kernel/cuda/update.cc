#include "chorale/kernel/cuda/update.h"

#include <algorithm>
#include <map>
#include <vector>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/update_attrs.h"

namespace chorale::cuda {
extern const std::string_view kUpdateCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kUpdateCu;

constexpr size_t kMostJobs = 40;
constexpr int64_t kElemsPerBlock = 4096;

// What kernels see (update.cu).
struct Job {
  void* weight = nullptr;
  void* rounded = nullptr;
  const void* gradient = nullptr;
  void* state[3] = {};
  void* step = nullptr;
  void* number = nullptr;
  int64_t n = 0;
};
struct Jobs {
  int64_t count = 0;
  int64_t first_block[kMostJobs + 1] = {};
  Job jobs[kMostJobs];
};
enum Kind : int64_t { kSgd, kAdam, kAdagrad, kRmsprop, kAdadelta, kAdamax, kNadam, kRadam, kAsgd, kRprop };
struct Rule {
  int64_t kind = 0, flags = 0;
  double sign = 1;
  double c[6] = {};
  const void* lr = nullptr;
  const void* found_inf = nullptr;
};

// Flags say what a kind does besides; states may lie at other places than they come in.
struct Described {
  Rule rule;
  size_t places[3] = {0, 1, 2};
};
Described describe(const SgdRule& o) {
  return {{kSgd, (o.momentum != 0 ? 2 : 0) | (o.nesterov ? 4 : 0), 1, {o.momentum, o.dampening, o.weight_decay}}};
}
Described describe(const AdamRule& o) {
  return {{kAdam, (o.decoupled ? 1 : 0) | (o.amsgrad ? 2 : 0), 1, {o.beta1, o.beta2, o.eps, o.weight_decay}}};
}
Described describe(const AdagradRule& o) { return {{kAdagrad, 0, 1, {o.lr_decay, o.eps, o.weight_decay}}}; }
Described describe(const RmspropRule& o) {
  Described d{
      {kRmsprop, (o.momentum != 0 ? 2 : 0) | (o.centered ? 4 : 0), 1, {o.alpha, o.eps, o.weight_decay, o.momentum}}};
  if (o.momentum == 0) d.places[1] = 2;
  return d;
}
Described describe(const AdadeltaRule& o) { return {{kAdadelta, 0, 1, {o.rho, o.eps, o.weight_decay}}}; }
Described describe(const AdamaxRule& o) { return {{kAdamax, 0, 1, {o.beta1, o.beta2, o.eps, o.weight_decay}}}; }
Described describe(const NadamRule& o) {
  return {{kNadam, o.decoupled ? 1 : 0, 1, {o.beta1, o.beta2, o.eps, o.weight_decay, o.momentum_decay}}};
}
Described describe(const RadamRule& o) {
  return {{kRadam, o.decoupled ? 1 : 0, 1, {o.beta1, o.beta2, o.eps, o.weight_decay}}};
}
Described describe(const AsgdRule& o) { return {{kAsgd, 0, 1, {o.lambd, o.alpha, o.t0, o.weight_decay}}}; }
Described describe(const RpropRule& o) { return {{kRprop, 0, 1, {o.shrink, o.grow, o.least_step, o.most_step}}}; }

constexpr const char* kKindNames[] = {"kSgd",    "kAdam",  "kAdagrad", "kRmsprop", "kAdadelta",
                                      "kAdamax", "kNadam", "kRadam",   "kAsgd",    "kRprop"};

// Results that are not their inputs get the values of those, so that a kernel can go on in place.
void start_from_inputs(std::span<const Tensor> in, std::span<const Tensor> out, Stream stream) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (in[i].raw() != out[i].raw()) copy_into(in[i], out[i], stream);
  }
}
Tensor laid_out_like(const Tensor& x, const Tensor& like, Stream stream) {
  if (x.strides() == like.strides() || (x.is_contiguous() && like.is_contiguous())) return x;
  Tensor other = Tensor::empty_strided(like.sizes(), like.strides(), x.dtype(), x.device());
  copy_into(x, other, stream);
  return other;
}

Tensor to_dtype(const Tensor& x, DType dtype, Stream stream) {
  return x.dtype() == dtype ? x : contiguous(x, dtype, stream);
}

// Calls run(jobs, dtype, blocks) for batches of jobs of one dtype each.
template <class F>
void in_batches(const std::vector<std::pair<DType, Job>>& jobs, F&& run) {
  std::vector<DType> dtypes;
  for (const auto& [dtype, job] : jobs) {
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  for (const DType dtype : dtypes) {
    Jobs batch;
    int64_t blocks = 0;
    const auto flush = [&] {
      if (batch.count > 0) run(batch, dtype, static_cast<unsigned>(blocks));
      batch.count = blocks = 0;
    };
    for (const auto& [its_dtype, job] : jobs) {
      if (its_dtype != dtype) continue;
      batch.jobs[batch.count] = job;
      batch.first_block[batch.count++] = blocks;
      blocks += std::max<int64_t>(1, (job.n + kElemsPerBlock - 1) / kElemsPerBlock);
      batch.first_block[batch.count] = blocks;
      if (static_cast<size_t>(batch.count) == kMostJobs) flush();
    }
    flush();
  }
}

template <class R>
void update_lists(const KernelArgs& args) {
  const auto& rule = args.attrs.get<R>();
  const size_t states = rule.states(), lists = 3 + states + (rule.masters ? 1 : 0);
  const size_t n = (args.in.size() - 2) / lists;
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  // Among the results there are no gradients: list 1 is that of the steps.
  const auto out = [&](size_t list) { return args.out.subspan(list * n, n); };
  for (size_t l = 0; l < lists; ++l) {
    if (l != 1) start_from_inputs(in(l), out(l == 0 ? 0 : l - 1), args.stream);
  }
  Described described = describe(rule);
  Rule& r = described.rule;
  r.sign = rule.maximize ? -1 : 1;
  const Tensor lr = contiguous(args.in[0], DType::kF64, args.stream);
  const Tensor found_inf = args.in[1].defined() ? contiguous(args.in[1], DType::kF32, args.stream) : Tensor();
  r.lr = lr.raw();
  r.found_inf = found_inf.defined() ? found_inf.raw() : nullptr;
  std::map<DType, std::vector<std::pair<DType, Job>>> jobs;  // by the dtype of gradients
  std::vector<Tensor> kept;                                  // gradients that had to be laid out anew
  kept.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Tensor& parameter = out(0)[i];
    Job job;
    job.weight = rule.masters ? out(2 + states)[i].raw() : parameter.raw();
    job.rounded = rule.masters ? parameter.raw() : nullptr;
    job.n = parameter.elems();
    job.step = out(1)[i].raw();
    constexpr size_t kNumbers = kLastStateIsNumber<R> ? 1 : 0;
    if (kNumbers > 0) job.number = out(1 + states)[i].raw();
    for (size_t s = 0; s < states - kNumbers; ++s) job.state[described.places[s]] = out(2 + s)[i].raw();
    kept.push_back(laid_out_like(in(1)[i], parameter, args.stream));
    job.gradient = kept.back().raw();
    jobs[kept.back().dtype()].emplace_back(parameter.dtype(), job);
  }
  for (const auto& [gradient, of_dtype] : jobs) {
    in_batches(of_dtype, [&, gradient = gradient](const Jobs& batch, DType dtype, unsigned blocks) {
      launch(instance(args.stream, kUpdateCu, "update", {dtype, gradient}, kKindNames[r.kind]), {.x = blocks},
             args.stream, batch, r);
    });
  }
}

std::vector<std::pair<DType, Job>> jobs_on(std::span<const Tensor> list) {
  std::vector<std::pair<DType, Job>> jobs;
  jobs.reserve(list.size());
  for (const Tensor& x : list) {
    Job job;
    job.weight = x.raw();
    job.n = x.elems();
    jobs.emplace_back(x.dtype(), job);
  }
  return jobs;
}

}  // namespace

void copy_each(const KernelArgs& args) {
  std::map<DType, std::vector<std::pair<DType, Job>>> jobs;  // by the dtype that is read
  for (size_t i = 0; i < args.in.size(); ++i) {
    const Tensor &from = args.in[i], &to = args.out[i];
    if (from.strides() != to.strides() || !is_dense(to.sizes(), to.strides())) {
      copy_into(from, to, args.stream);
      continue;
    }
    Job job;
    job.weight = to.raw();
    job.gradient = from.raw();
    job.n = to.elems();
    jobs[from.dtype()].emplace_back(to.dtype(), job);
  }
  for (const auto& [from, of_dtype] : jobs) {
    in_batches(of_dtype, [&, from = from](const Jobs& batch, DType to, unsigned blocks) {
      launch(instance(args.stream, kUpdateCu, "cast_list", {to, from}), {.x = blocks}, args.stream, batch);
    });
  }
}

void update_sgd(const KernelArgs& args) { update_lists<SgdRule>(args); }
void update_adam(const KernelArgs& args) { update_lists<AdamRule>(args); }
void update_adagrad(const KernelArgs& args) { update_lists<AdagradRule>(args); }
void update_rmsprop(const KernelArgs& args) { update_lists<RmspropRule>(args); }
void update_adadelta(const KernelArgs& args) { update_lists<AdadeltaRule>(args); }
void update_adamax(const KernelArgs& args) { update_lists<AdamaxRule>(args); }
void update_nadam(const KernelArgs& args) { update_lists<NadamRule>(args); }
void update_radam(const KernelArgs& args) { update_lists<RadamRule>(args); }
void update_asgd(const KernelArgs& args) { update_lists<AsgdRule>(args); }
void update_rprop(const KernelArgs& args) { update_lists<RpropRule>(args); }

namespace {
// What kernels see (update.cu).
struct LambJobs {
  Jobs jobs;
  void* weights[kMostJobs] = {};
  void* steps[kMostJobs] = {};
};
Rule lamb_rule(const LambRule& o, const Tensor& lr, const Tensor& found_inf) {
  Rule r{};
  r.c[0] = o.beta1;
  r.c[1] = o.beta2;
  r.c[2] = o.eps;
  r.c[3] = o.weight_decay;
  r.sign = o.maximize ? -1 : 1;
  r.lr = lr.raw();
  r.found_inf = found_inf.defined() ? found_inf.raw() : nullptr;
  return r;
}
// One launch for as many jobs of a dtype as fit: run(batch, dtype, blocks).
struct LambJob {
  DType dtype;
  Job job;
  void *weights, *steps;
};
template <class F>
void in_lamb_batches(const std::vector<LambJob>& jobs, F&& run) {
  for (size_t first = 0; first < jobs.size();) {
    LambJobs batch;
    int64_t blocks = 0;
    size_t next = first;
    for (; next < jobs.size() && next - first < kMostJobs && jobs[next].dtype == jobs[first].dtype; ++next) {
      const size_t at = next - first;
      batch.jobs.jobs[at] = jobs[next].job;
      batch.jobs.first_block[at] = blocks;
      blocks += (jobs[next].job.n + kElemsPerBlock - 1) / kElemsPerBlock;
      batch.jobs.first_block[at + 1] = blocks;
      batch.weights[at] = jobs[next].weights;
      batch.steps[at] = jobs[next].steps;
    }
    batch.jobs.count = static_cast<int64_t>(next - first);
    run(batch, jobs[first].dtype, static_cast<unsigned>(blocks));
    first = next;
  }
}
}  // namespace

void lamb_moments(const KernelArgs& args) {
  const auto& rule = args.attrs.get<LambRule>();
  const Stream stream = args.stream;
  const size_t n = (args.in.size() - 2) / (5 + (rule.masters ? 1 : 0)), sums = rule.masters ? 4 : 3;
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  const auto out = [&](size_t list) { return args.out.subspan(list * n, n); };
  for (size_t l = 0; l < sums; ++l) start_from_inputs(in(2 + l), out(l), stream);
  const Tensor lr = contiguous(args.in[0], DType::kF64, stream);
  const Tensor found_inf = args.in[1].defined() ? contiguous(args.in[1], DType::kF32, stream) : Tensor();
  std::vector<LambJob> jobs;
  std::vector<Tensor> kept;
  for (size_t i = 0; i < n; ++i) {
    const Tensor& first = out(1)[i];
    const Tensor parameter = laid_out_like(in(0)[i], first, stream),
                 gradient = laid_out_like(to_dtype(in(1)[i], parameter.dtype(), stream), first, stream);
    Job job;
    job.weight = rule.masters ? out(3)[i].raw() : parameter.raw();
    job.rounded = rule.masters ? parameter.raw() : nullptr;
    job.gradient = gradient.raw();
    job.state[0] = first.raw();
    job.state[1] = out(2)[i].raw();
    job.step = out(0)[i].raw();
    job.n = first.elems();
    jobs.push_back({parameter.dtype(), job, out(sums)[i].raw(), out(sums + 1)[i].raw()});
    kept.push_back(parameter);
    kept.push_back(gradient);
  }
  in_lamb_batches(jobs, [&](const LambJobs& batch, DType dtype, unsigned) {
    launch(instance(stream, kUpdateCu, "lamb_moments", {dtype}),
           {.x = static_cast<unsigned>(batch.jobs.count), .threads = 1024}, stream, batch,
           lamb_rule(rule, lr, found_inf));
  });
}

void lamb_apply(const KernelArgs& args) {
  const auto& rule = args.attrs.get<LambRule>();
  const Stream stream = args.stream;
  const size_t n = (args.in.size() - 2) / (6 + (rule.masters ? 1 : 0));
  const auto in = [&](size_t list) { return args.in.subspan(2 + list * n, n); };
  const auto parameters = args.out.first(n), masters = args.out.subspan(n);
  start_from_inputs(in(0), parameters, stream);
  if (rule.masters) start_from_inputs(in(6), masters, stream);
  const Tensor lr = contiguous(args.in[0], DType::kF64, stream);
  const Tensor found_inf = args.in[1].defined() ? contiguous(args.in[1], DType::kF32, stream) : Tensor();
  std::vector<LambJob> jobs;
  std::vector<Tensor> kept;
  for (size_t i = 0; i < n; ++i) {
    Job job;
    job.weight = rule.masters ? masters[i].raw() : parameters[i].raw();
    job.rounded = rule.masters ? parameters[i].raw() : nullptr;
    for (size_t s = 0; s < 2; ++s) {
      kept.push_back(laid_out_like(in(2 + s)[i], parameters[i], stream));
      job.state[s] = kept.back().raw();
    }
    kept.push_back(contiguous(in(1)[i], DType::kI64, stream));
    job.step = kept.back().raw();
    job.n = parameters[i].elems();
    const Tensor weights = contiguous(in(4)[i], DType::kF64, stream), steps = contiguous(in(5)[i], DType::kF64, stream);
    jobs.push_back({parameters[i].dtype(), job, weights.raw(), steps.raw()});
    kept.push_back(weights);
    kept.push_back(steps);
  }
  in_lamb_batches(jobs, [&](const LambJobs& batch, DType dtype, unsigned blocks) {
    if (blocks == 0) return;
    launch(instance(stream, kUpdateCu, "lamb_apply", {dtype}), {.x = blocks}, stream, batch,
           lamb_rule(rule, lr, found_inf));
  });
}

void power_sums(const KernelArgs& args) {
  const double p = args.attrs.get<PowerAttrs>().p;
  std::vector<std::pair<DType, Job>> jobs;
  std::vector<Tensor> kept;
  jobs.reserve(args.in.size());
  kept.reserve(args.in.size());
  for (size_t i = 0; i < args.in.size(); ++i) {
    const Tensor& x = args.in[i];
    kept.push_back(is_dense(x.sizes(), x.strides()) ? x : contiguous(x, args.stream));
    Job job;
    job.gradient = kept.back().raw();
    job.number = args.out[i].raw();
    job.n = x.elems();
    jobs.emplace_back(x.dtype(), job);
  }
  in_batches(jobs, [&](const Jobs& batch, DType dtype, unsigned) {
    launch(instance(args.stream, kUpdateCu, "power_sums", {dtype}),
           {.x = static_cast<unsigned>(batch.count), .threads = 1024}, args.stream, batch, p);
  });
}

void clip_by_norm(const KernelArgs& args) {
  start_from_inputs(args.in.subspan(1), args.out, args.stream);
  const Tensor norm = contiguous(args.in[0], DType::kF64, args.stream);
  const double max_norm = args.attrs.get<ClipNormAttrs>().max_norm;
  const void* const none = nullptr;
  in_batches(jobs_on(args.out), [&](const Jobs& batch, DType dtype, unsigned blocks) {
    if (blocks == 0) return;
    launch(instance(args.stream, kUpdateCu, "scale_list", {dtype}), {.x = blocks}, args.stream, batch, norm.raw(),
           max_norm, none, none);
  });
}

void clip_by_value(const KernelArgs& args) {
  start_from_inputs(args.in, args.out, args.stream);
  const double limit = args.attrs.get<ClipValueAttrs>().limit;
  in_batches(jobs_on(args.out), [&](const Jobs& batch, DType dtype, unsigned blocks) {
    if (blocks == 0) return;
    launch(instance(args.stream, kUpdateCu, "clamp_list", {dtype}), {.x = blocks}, args.stream, batch, limit);
  });
}

void unscale(const KernelArgs& args) {
  start_from_inputs(args.in.subspan(1), args.out, args.stream);
  const Tensor scale = contiguous(args.in[0], DType::kF32, args.stream);
  const void* const none = nullptr;
  in_batches(jobs_on(args.out.subspan(1)), [&](const Jobs& batch, DType dtype, unsigned blocks) {
    if (blocks == 0) return;
    launch(instance(args.stream, kUpdateCu, "scale_list", {dtype}), {.x = blocks}, args.stream, batch, none, 0.0,
           scale.raw(), args.out[0].raw());
  });
}

void next_loss_scale(const KernelArgs& args) {
  const auto& a = args.attrs.get<LossScaleAttrs>();
  launch(instance(args.stream, kUpdateCu, "next_scale", {DType::kF32}), {.threads = 1}, args.stream, args.in[0].raw(),
         args.in[1].raw(), args.in[2].raw(), args.out[0].raw(), args.out[1].raw(), a.growth, a.backoff, a.interval);
}

}  // namespace chorale::kernel::cuda
