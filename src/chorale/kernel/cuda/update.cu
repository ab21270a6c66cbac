// Updates of optimizers over lists of parameters, with the rules of vec/update.h. What changes from step to step is
// read here, from memory of the device, so that a recorded step can be replayed.
struct Job {
  void* weight;   // the master copy of a parameter of a 16-bit type
  void* rounded;  // the parameter itself then
  const void* gradient;
  void* state[3];
  i64* step;
  double* number;  // a state that is one number for the parameter
  i64 n;
};
struct Jobs {
  i64 count;
  i64 first_block[41];  // of each job; the last entry is the number of blocks
  Job jobs[40];
};
enum Kind { kSgd, kAdam, kAdagrad, kRmsprop, kAdadelta, kAdamax, kNadam, kRadam, kAsgd, kRprop };
struct Rule {
  i64 kind;
  i64 flags;    // of the kind: see the uses
  double sign;  // -1: the gradient is followed up
  double c[6];  // constants of the kind
  const double* lr;
  const float* found_inf;  // null, or nothing is updated where it is not 0
};
__device__ __forceinline__ double nadam_momentum(const Rule& r, double step) {
  return r.c[0] * (1 - 0.5 * ::pow(0.96, step * r.c[4]));
}
// The count of steps goes up, and the product of momenta on; called once by each block of a job. Its blocks count
// themselves in the upper half of the count, and the last one of them, when nobody reads any more, writes both.
__device__ __forceinline__ i64 raise(const Job& job, i64 blocks, const Rule& r, double& number) {
  number = job.number ? *(volatile double*)job.number : 0;
  __threadfence();
  const u64 seen = atomicAdd((u64*)job.step, 1ull << 32);
  const i64 step = (i64)(seen & 0xffffffffu) + 1;
  if (job.number) number *= nadam_momentum(r, (double)step);
  if ((i64)(seen >> 32) + 1 == blocks) {
    *job.step = step;
    if (job.number) *job.number = number;
  }
  return step;
}

struct Recipe {
  double weight_decay, keep, rate, decay1, gain1, decay2, gain2, scale1, root_scale, eps;
  int plain;  // Radam's first steps: no division by the root
};
// Squares again and again, which takes a fifth of the time of ::pow, for which all threads of a block would wait.
__device__ __forceinline__ double power(double base, i64 n) {
  double result = 1;
  for (; n > 0; n >>= 1, base *= base) result = n & 1 ? result * base : result;
  return result;
}
__device__ Recipe recipe_of(const Rule& r, double lr, i64 step, double number) {
  Recipe p = {0, 1, lr, 0, 0, 0, 0, 1, 1, 0, 0};
  const double t = (double)step;
  const bool decoupled = (r.flags & 1) != 0;
  const auto moments = [&] {  // c: beta1, beta2, eps, weight decay
    p.gain1 = 1 - r.c[0];
    p.decay2 = r.c[1];
    p.gain2 = 1 - r.c[1];
    p.eps = r.c[2];
    (decoupled ? p.keep : p.weight_decay) = decoupled ? 1 - lr * r.c[3] : r.c[3];
  };
  switch (r.kind) {
    case kSgd:  // momentum, dampening, weight decay; flag 2: momentum, 4: Nesterov
      p.weight_decay = r.c[2];
      p.decay1 = r.c[0];
      p.gain1 = step == 1 ? 1 : 1 - r.c[1];
      break;
    case kAdam:  // flag 2: Amsgrad
      moments();
      p.rate = lr / (1 - power(r.c[0], step));
      p.root_scale = 1 / ::sqrt(1 - power(r.c[1], step));
      break;
    case kAdagrad:  // decay of the rate, eps, weight decay
      p.rate = lr / (1 + (t - 1) * r.c[0]);
      p.eps = r.c[1];
      p.weight_decay = r.c[2];
      break;
    case kRmsprop:  // alpha, eps, weight decay, momentum; flag 2: momentum, 4: centered
      p.decay2 = r.c[0];
      p.gain2 = 1 - r.c[0];
      p.eps = r.c[1];
      p.weight_decay = r.c[2];
      p.decay1 = r.c[3];
      break;
    case kAdadelta:  // rho, eps, weight decay
      p.decay2 = r.c[0];
      p.gain2 = 1 - r.c[0];
      p.eps = r.c[1];
      p.weight_decay = r.c[2];
      break;
    case kAdamax:
      moments();
      p.rate = lr / (1 - power(r.c[0], step));
      break;
    case kNadam: {  // c[4]: decay of the momentum
      moments();
      const double momentum = nadam_momentum(r, t), next = nadam_momentum(r, t + 1);
      p.rate = lr * (1 - momentum) / (1 - number);
      p.scale1 = lr * next / (1 - number * next);
      p.root_scale = 1 / ::sqrt(1 - power(r.c[1], step));
      break;
    }
    case kRadam: {
      moments();
      const double correction1 = 1 - power(r.c[0], step), correction2 = 1 - power(r.c[1], step);
      const double longest = 2 / (1 - r.c[1]) - 1, length = longest - 2 * t * (1 - correction2) / correction2;
      p.rate = lr / correction1;
      p.plain = !(length > 5);
      if (length > 5) {
        p.rate *=
            ::sqrt(correction2 * (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
      }
      break;
    }
    case kAsgd: {  // lambda, alpha, t0, weight decay
      const double before = t - 1;
      p.weight_decay = r.c[3];
      p.rate = lr / ::pow(1 + r.c[0] * lr * before, r.c[1]);
      p.keep = 1 - r.c[0] * p.rate;
      p.gain1 = 1 / (before - r.c[2] > 1 ? before - r.c[2] : 1.0);
      break;
    }
    case kRprop:  // shrink, grow, least and most step
      p.decay1 = r.c[0];
      p.gain1 = r.c[1];
      p.eps = r.c[2];
      p.scale1 = r.c[3];
      break;
  }
  return p;
}

constexpr int kElemsPerBlock = 4096;

// A recipe in the type that is computed in.
template <class C>
struct Numbers {
  C decay, keep, rate, decay1, gain1, decay2, gain2, scale1, root_scale, eps;
  int plain;
  __device__ explicit Numbers(const Recipe& r)
      : decay((C)r.weight_decay),
        keep((C)r.keep),
        rate((C)r.rate),
        decay1((C)r.decay1),
        gain1((C)r.gain1),
        decay2((C)r.decay2),
        gain2((C)r.gain2),
        scale1((C)r.scale1),
        root_scale((C)r.root_scale),
        eps((C)r.eps),
        plain(r.plain) {}
};
template <int kKind, class C>
__device__ __forceinline__ void update_one(C& w, C g, C& s0, C& s1, C& s2, const Numbers<C>& n, i64 flags) {
  g = ::fma(n.decay, w, g);
  w = n.keep * w;
  if constexpr (kKind == kSgd) {
    if (flags & 2) {
      const C s = ::fma(n.decay1, s0, n.gain1 * g);
      s0 = s;
      w = ::fma(-n.rate, (flags & 4) ? ::fma(n.decay1, s, g) : s, w);
    } else {
      w = ::fma(-n.rate, g, w);
    }
  } else if constexpr (kKind == kAdam || kKind == kNadam || kKind == kRadam) {
    const C m = ::fma(n.gain1, g - s0, s0), q = ::fma(n.decay2, s1, n.gain2 * (g * g));
    s0 = m;
    s1 = q;
    C second = q;
    if (kKind == kAdam && (flags & 2)) {
      second = s2 > q ? s2 : q;
      s2 = second;
    }
    if (kKind == kRadam && n.plain) {
      w = ::fma(-n.rate, m, w);
    } else {
      const C divisor = ::fma(::sqrt(second), n.root_scale, n.eps);
      w = kKind == kNadam ? w - ::fma(n.rate, g, n.scale1 * m) / divisor : ::fma(-n.rate, m / divisor, w);
    }
  } else if constexpr (kKind == kAdagrad) {
    const C s = ::fma(g, g, s0);
    s0 = s;
    w = ::fma(-n.rate, g / (::sqrt(s) + n.eps), w);
  } else if constexpr (kKind == kRmsprop) {
    const C s = ::fma(n.decay2, s0, n.gain2 * (g * g));
    s0 = s;
    C second = s;
    if (flags & 4) {
      const C average = ::fma(n.gain2, g - s2, s2);
      s2 = average;
      second = ::fma(-average, average, s);
    }
    C step = g / (::sqrt(second) + n.eps);
    if (flags & 2) {
      step = ::fma(n.decay1, s1, step);
      s1 = step;
    }
    w = ::fma(-n.rate, step, w);
  } else if constexpr (kKind == kAdadelta) {
    const C s = ::fma(n.decay2, s0, n.gain2 * (g * g));
    s0 = s;
    const C u = ::sqrt(s1 + n.eps) / ::sqrt(s + n.eps) * g;
    s1 = ::fma(n.decay2, s1, n.gain2 * (u * u));
    w = ::fma(-n.rate, u, w);
  } else if constexpr (kKind == kAdamax) {
    const C m = ::fma(n.gain1, g - s0, s0), size = ::fabs(g) + n.eps, most = n.decay2 * s1;
    const C u = most > size ? most : size;
    s0 = m;
    s1 = u;
    w = ::fma(-n.rate, m / u, w);
  } else if constexpr (kKind == kRprop) {
    const C product = g * s0, wanted = s1 * (product > 0 ? n.gain1 : product < 0 ? n.decay1 : C(1));
    const C step = wanted < n.eps ? n.eps : wanted > n.scale1 ? n.scale1 : wanted, followed = product < 0 ? C(0) : g;
    s0 = followed;
    s1 = step;
    w -= followed > 0 ? step : followed < 0 ? -step : C(0);
  } else {
    w = ::fma(-n.rate, g, w);
    s0 = n.gain1 == C(1) ? w : ::fma(n.gain1, w - s0, s0);
  }
}
// So many neighbours are read and written at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Neighbours {
  T at[kCount];
};
// The elements of a job from begin to end, by a block. Gradients are of type G.
template <class T, class G, int kKind, int kCount>
__device__ __forceinline__ void update_stretch(const Job& job, i64 begin, i64 end, const Numbers<Compute<T> >& n,
                                               i64 flags, Compute<T> sign) {
  typedef Compute<T> C;
  typedef Neighbours<C, kCount> Wide;
  typedef Neighbours<T, kCount> Narrow;
  typedef Neighbours<G, kCount> Gradient;
  T* const rounded = (T*)job.rounded;
#pragma unroll 2
  for (i64 i = begin + threadIdx.x * kCount; i < end; i += blockDim.x * kCount) {
    Wide w = *(const Wide*)((const C*)job.weight + i), s[3] = {};
    const Gradient g = *(const Gradient*)((const G*)job.gradient + i);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (job.state[k]) s[k] = *(const Wide*)((const C*)job.state[k] + i);
    }
    if (rounded) {
      // A master that does not round to its parameter was overtaken by a write to the parameter.
      const Narrow own = *(const Narrow*)(rounded + i);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (widen(cast<T>(w.at[j])) != widen(own.at[j])) w.at[j] = widen(own.at[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      update_one<kKind>(w.at[j], sign * widen(g.at[j]), s[0].at[j], s[1].at[j], s[2].at[j], n, flags);
    *(Wide*)((C*)job.weight + i) = w;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (job.state[k]) *(Wide*)((C*)job.state[k] + i) = s[k];
    }
    if (rounded) {
      Narrow own;
#pragma unroll
      for (int j = 0; j < kCount; ++j) own.at[j] = cast<T>(w.at[j]);
      *(Narrow*)(rounded + i) = own;
    }
  }
}

template <class T, class G, int kKind>
__global__ void __launch_bounds__(256) update(const Jobs jobs, const Rule r) {
  typedef Compute<T> C;
  if (r.found_inf && *r.found_inf != 0) return;
  __shared__ Recipe recipe;
  __shared__ int which;
  if (threadIdx.x == 0) {
    int low = 0, high = (int)jobs.count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (jobs.first_block[middle] <= blockIdx.x)
        low = middle;
      else
        high = middle - 1;
    }
    which = low;
    const Job& job = jobs.jobs[low];
    double number;
    const i64 step = raise(job, jobs.first_block[low + 1] - jobs.first_block[low], r, number);
    recipe = recipe_of(r, *r.lr, step, number);
  }
  __syncthreads();
  const Job& job = jobs.jobs[which];
  const i64 begin = (blockIdx.x - jobs.first_block[which]) * kElemsPerBlock;
  const i64 end = begin + kElemsPerBlock < job.n ? begin + kElemsPerBlock : job.n;
  const Numbers<C> numbers(recipe);
  constexpr int kCount = 16 / sizeof(C);
  const u64 addresses = (u64)job.weight | (u64)job.state[0] | (u64)job.state[1] | (u64)job.state[2] |
                        (u64)job.gradient * sizeof(C) / sizeof(G) | (u64)job.rounded * sizeof(C) / sizeof(T);
  if (addresses % 16 == 0 && (end - begin) % kCount == 0) {
    update_stretch<T, G, kKind, kCount>(job, begin, end, numbers, r.flags, (C)r.sign);
  } else {
    update_stretch<T, G, kKind, 1>(job, begin, end, numbers, r.flags, (C)r.sign);
  }
}

// The job of this block, and its stretch.
struct Stretch {
  const Job& job;
  i64 begin, end;
};
__device__ __forceinline__ Stretch stretch_of(const Jobs& jobs) {
  int low = 0, high = (int)jobs.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (jobs.first_block[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle - 1;
  }
  const Job& job = jobs.jobs[low];
  const i64 begin = (blockIdx.x - jobs.first_block[low]) * kElemsPerBlock;
  const i64 end = begin + kElemsPerBlock < job.n ? begin + kElemsPerBlock : job.n;
  return {job, begin, end};
}

// ---- casts: weight is what is written, gradient what is read

template <class To, class From, int kCount>
__device__ __forceinline__ void cast_stretch(const Job& job, i64 begin, i64 end) {
#pragma unroll 2
  for (i64 i = begin + threadIdx.x * kCount; i < end; i += blockDim.x * kCount) {
    const Neighbours<From, kCount> from = *(const Neighbours<From, kCount>*)((const From*)job.gradient + i);
    Neighbours<To, kCount> to;
#pragma unroll
    for (int j = 0; j < kCount; ++j) to.at[j] = cast<To>(from.at[j]);
    *(Neighbours<To, kCount>*)((To*)job.weight + i) = to;
  }
}
template <class To, class From>
__global__ void __launch_bounds__(256) cast_list(const Jobs jobs) {
  const Stretch all = stretch_of(jobs);
  const Job& job = all.job;
  constexpr int kCount = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  const bool in_packs = ((u64)job.weight % (sizeof(To) * kCount) | (u64)job.gradient % (sizeof(From) * kCount)) == 0;
  if (in_packs && (all.end - all.begin) % kCount == 0) {
    cast_stretch<To, From, kCount>(job, all.begin, all.end);
  } else {
    cast_stretch<To, From, 1>(job, all.begin, all.end);
  }
}

// ---- lists of gradients: weight is the element, gradient where it is read from

// A block per job: sums in f64, in a fixed order.
template <class T>
__global__ void power_sums(const Jobs jobs, double p) {
  const Job& job = jobs.jobs[blockIdx.x];
  const T* const x = (const T*)job.gradient;
  double sum = 0;
  for (i64 i = threadIdx.x; i < job.n; i += blockDim.x) {
    const double size = ::fabs((double)widen(x[i]));
    if (p > 1e300) {
      sum = Larger::of(sum, size);
    } else {
      sum += p == 2 ? size * size : p == 1 ? size : ::pow(size, p);
    }
  }
  sum = p > 1e300 ? over_block<Larger>(sum, 0.0) : over_block<Plus>(sum, 0.0);
  if (threadIdx.x == 0) *job.number = sum;
}
// x *= factor, where the norm (clip) or the scale (unscale) says so.
template <class T>
__global__ void scale_list(const Jobs jobs, const double* norm, double max_norm, const float* scale, float* found_inf) {
  typedef Compute<T> C;
  double factor = 1;
  if (norm) {
    factor = max_norm / (*norm + 1e-6);
    if (!::isfinite(*norm) || factor >= 1) return;
  } else {
    factor = 1 / (double)*scale;
  }
  const Stretch all = stretch_of(jobs);
  const Job& job = all.job;
  const i64 begin = all.begin, end = all.end;
  T* const x = (T*)job.weight;
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const C value = widen(x[i]);
    if (found_inf && !::isfinite(value)) *found_inf = 1;
    x[i] = cast<T>(value * (C)factor);
  }
}
template <class>
__global__ void next_scale(const float* scale, const i64* steps, const float* found, float* next, i64* next_steps,
                           double growth, double backoff, i64 interval) {
  float now = *scale;
  i64 count = *found != 0 ? 0 : *steps + 1;
  if (*found != 0) {
    now = (float)(now * backoff);
  } else if (count == interval) {
    const float grown = (float)(now * growth);
    if (::isfinite(grown)) now = grown;
    count = 0;
  }
  *next = now;
  *next_steps = count;
}
template <class T>
__global__ void clamp_list(const Jobs jobs, double limit) {
  typedef Compute<T> C;
  const Stretch all = stretch_of(jobs);
  const Job& job = all.job;
  const i64 begin = all.begin, end = all.end;
  T* const x = (T*)job.weight;
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const C value = widen(x[i]), bound = (C)limit;  // NaN stays
    x[i] = cast<T>(value < -bound ? -bound : value > bound ? bound : value);
  }
}

// ---- Lamb: moments and sums of squares in one pass, the update in another

struct LambRecipe {
  double decay, rate, gain1, decay2, gain2, scale1, root_scale, eps, sign;
};
struct LambJobs {
  Jobs jobs;
  double* weights[40];  // sums of squares, of weights and of steps
  double* steps[40];
};
__device__ __forceinline__ LambRecipe lamb_recipe(const Rule& r, i64 step) {  // beta1, beta2, eps, weight decay
  return {
      r.c[3], 0,     1 - r.c[0], r.c[1], 1 - r.c[1], 1 / (1 - power(r.c[0], step)), 1 / ::sqrt(1 - power(r.c[1], step)),
      r.c[2], r.sign};
}
template <class C>
__device__ __forceinline__ C lamb_step(const LambRecipe& p, C w, C first, C second) {
  const C divisor = ::fma(::sqrt(second), (C)p.root_scale, (C)p.eps);
  return ::fma((C)p.decay, w, (C)p.scale1 * first / divisor);
}
template <class T>
__device__ __forceinline__ Compute<T> master_of(const Job& job, i64 i) {
  Compute<T> w = ((const Compute<T>*)job.weight)[i];
  if (job.rounded) {
    const Compute<T> own = widen(((const T*)job.rounded)[i]);
    if (widen(cast<T>(w)) != own) w = own;
  }
  return w;
}
// A block per job, so that its sums have a fixed order.
template <class T>
__global__ void __launch_bounds__(1024) lamb_moments(const LambJobs l, const Rule r) {
  typedef Compute<T> C;
  const Job& job = l.jobs.jobs[blockIdx.x];
  double weights = 0, steps = 0;
  if (!(r.found_inf && *r.found_inf != 0)) {
    const LambRecipe p = lamb_recipe(r, *job.step + 1);
    __syncthreads();
    if (threadIdx.x == 0) ++*job.step;
    C *const first = (C*)job.state[0], *const second = (C*)job.state[1];
    for (i64 i = threadIdx.x; i < job.n; i += blockDim.x) {
      const C w = master_of<T>(job, i), g = (C)p.sign * widen(((const T*)job.gradient)[i]);
      const C m = ::fma((C)p.gain1, g - first[i], first[i]), q = ::fma((C)p.decay2, second[i], (C)p.gain2 * (g * g));
      first[i] = m;
      second[i] = q;
      const C step = lamb_step(p, w, m, q);
      weights += (double)w * (double)w;
      steps += (double)step * (double)step;
      if (job.rounded) ((C*)job.weight)[i] = w;
    }
  }
  weights = over_block<Plus>(weights, 0.0);
  steps = over_block<Plus>(steps, 0.0);
  if (threadIdx.x == 0) {
    *l.weights[blockIdx.x] = weights;
    *l.steps[blockIdx.x] = steps;
  }
}
template <class T>
__global__ void __launch_bounds__(256) lamb_apply(const LambJobs l, const Rule r) {
  typedef Compute<T> C;
  if (r.found_inf && *r.found_inf != 0) return;
  const Stretch all = stretch_of(l.jobs);
  const Job& job = all.job;
  const i64 number = &all.job - l.jobs.jobs;
  const double weights = *l.weights[number], steps = *l.steps[number];
  const C rate = (C)(*r.lr * (weights > 0 && steps > 0 ? ::sqrt(weights / steps) : 1.0));
  const LambRecipe p = lamb_recipe(r, *job.step);
  for (i64 i = all.begin + threadIdx.x; i < all.end; i += blockDim.x) {
    C w = master_of<T>(job, i);
    w = ::fma(-rate, lamb_step(p, w, ((const C*)job.state[0])[i], ((const C*)job.state[1])[i]), w);
    ((C*)job.weight)[i] = w;
    if (job.rounded) ((T*)job.rounded)[i] = cast<T>(w);
  }
}
