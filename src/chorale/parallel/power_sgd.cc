#include "chorale/parallel/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "chorale/api/api.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/value.h"

namespace chorale::parallel {
namespace {

using State = std::vector<std::pair<std::string, Tensor>>;

void check(const PowerSgdOptions& options) {
  CHORALE_CHECK(options.rank >= 1, "[power_sgd] expected a rank of at least 1, found ", options.rank);
  CHORALE_CHECK(!(options.error_feedback || options.warm_start) || options.start_iteration >= 2,
                "[power_sgd] with error feedback or warm start the first 2 steps must be exact, since buckets are "
                "arranged anew after the first; found start_iteration ",
                options.start_iteration);
}

// Orthonormal columns that span those of x.
Tensor orthonormal(const Tensor& x) { return qr(x).q; }

int64_t bytes_of(const std::vector<Tensor>& tensors) {
  int64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += t.elems() * static_cast<int64_t>(t.elem_bytes());
  return bytes;
}

// The bucket's gradients as views of its buffer, also when a wrapper has put another one in its place.
std::vector<Tensor> gradients_in_buffer(const GradBucket& bucket) {
  const Tensor& buffer = bucket.buffer();
  std::vector<Tensor> views;
  int64_t offset = buffer.offset();
  for (const Tensor& g : bucket.gradients()) {
    views.push_back(buffer.view_as(g.sizes(), g.strides(), offset));
    offset += g.elems();
  }
  return views;
}

}  // namespace

// values ≈ p q^T. After the all-reduce of q all ranks have the same p and q.
struct PowerSgd::Matrix {
  Tensor target;  // in the buffer
  Tensor values;  // [n, m], with the error of the step before
  Tensor p;       // [n, r]
  Tensor q;       // [m, r]
  size_t key = 0;
};

PowerSgd::PowerSgd(const PowerSgdOptions& options) : options_(options) { check(options); }

bool PowerSgd::compresses(int64_t rows, int64_t columns) const {
  const int64_t rank = std::min({rows, columns, options_.rank});
  return static_cast<double>((rows + columns) * rank) * options_.min_compression_rate <
         static_cast<double>(rows * columns);
}

// Where the search for m's factors begins: the directions that were found last, or random ones, the same on all ranks
// and other ones in each step.
Tensor PowerSgd::start_of(const Matrix& m, int64_t iteration) const {
  const int64_t columns = m.values.size(1), rank = std::min({m.values.size(0), columns, options_.rank});
  if (const auto memory = now_.memories.find(m.key); memory != now_.memories.end() && options_.warm_start) {
    if (memory->second.q.defined() && memory->second.q.sizes() == Shape{columns, rank})
      return orthonormal(to(memory->second.q, m.values.device()));
  }
  Generator numbers = Generator(options_.seed).fork(static_cast<uint64_t>(iteration)).fork(m.key);
  return orthonormal(normal({columns, rank}, 0, 1, m.values.dtype(), numbers, m.values.device()));
}

PowerSgd::Matrix PowerSgd::factorize(const Tensor& target, const Tensor& values, size_t key, int64_t iteration) {
  Matrix m{.target = target, .values = values, .p = {}, .q = {}, .key = key};
  if (const auto memory = now_.memories.find(m.key); memory != now_.memories.end()) {
    const Tensor& error = memory->second.error;
    if (error.defined() && error.sizes() == values.sizes()) m.values = values + to(error, values.device());
  }
  m.p = matmul(m.values, start_of(m, iteration));
  return m;
}

comm::Future PowerSgd::reduce(GradBucket& bucket, bool batched) {
  const comm::Group& group = bucket.group();
  const Tensor& buffer = bucket.buffer();
  const int64_t iteration = now_.iteration;
  if (bucket.is_last()) ++now_.iteration;
  now_.gradient_bytes += bytes_of({buffer});

  std::vector<Matrix> matrices;
  std::vector<Tensor> plain;
  const DType dtype = compute_of(buffer.dtype());
  if (iteration < options_.start_iteration) {
    plain.push_back(buffer);
  } else if (batched) {
    const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(buffer.elems()))));
    const Tensor square = view(pad(to(buffer, dtype), {0, side * side - buffer.elems()}), {side, side});
    matrices.push_back(factorize(buffer, square, bucket.index(), iteration));
  } else {
    const std::vector<Tensor> gradients = gradients_in_buffer(bucket);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& g = gradients[i];
      const int64_t rows = g.dims() > 0 ? g.size(0) : 1, columns = rows > 0 ? g.elems() / rows : 0;
      if (g.dims() < 2 || !compresses(rows, columns)) {
        plain.push_back(g);
      } else {
        matrices.push_back(factorize(g, to(reshape(g, {rows, columns}), dtype), bucket.parameters()[i], iteration));
      }
    }
  }

  const comm::Reduction averaging = comm::premultiplied_sum(1.0 / group.size());
  now_.sent_bytes += bytes_of(plain);
  const comm::Work uncompressed = plain.empty() ? comm::Work() : group.all_reduce_coalesced(plain, averaging);
  if (matrices.empty()) {
    return uncompressed.future().then([buffer](const Tensors&) { return Tensors{buffer}; });
  }
  std::vector<Tensor> ps, qs;
  for (const Matrix& m : matrices) ps.push_back(m.p);
  // Waited for here, and not by a function chained to it: what that would send could meet the calls of the next bucket
  // in another order on another rank.
  group.all_reduce_coalesced(ps).wait();
  for (Matrix& m : matrices) {
    m.p = orthonormal(m.p);
    m.q = matmul(t(m.values), m.p);
    qs.push_back(m.q);
    // What this rank's own factors miss, not what the average differs by: that would add up.
    if (options_.error_feedback) now_.memories[m.key].error = m.values - matmul(m.p, t(m.q));
    m.values = {};  // not needed any more
  }
  now_.sent_bytes += bytes_of(ps) + bytes_of(qs);
  // Calls of a group end in order: the uncompressed ones are there too.
  return group.all_reduce_coalesced(qs, averaging)
      .future()
      .then([self = shared_from_this(), buffer, matrices = std::move(matrices)](const Tensors&) {
        for (const Matrix& m : matrices) {
          const Tensor found = matmul(m.p, t(m.q));
          copy_(m.target, view(narrow(flatten(found), 0, 0, m.target.elems()), m.target.sizes()));
          if (self->options_.warm_start) self->now_.memories[m.key].q = m.q;
        }
        return Tensors{buffer};
      });
}

CommHook power_sgd_hook(std::shared_ptr<PowerSgd> state) {
  CHORALE_CHECK(state, "[power_sgd] there is no state");
  return {"power_sgd", [state](GradBucket& bucket) { return state->reduce(bucket, false); }, std::move(state)};
}
CommHook batched_power_sgd_hook(std::shared_ptr<PowerSgd> state) {
  CHORALE_CHECK(state, "[batched_power_sgd] there is no state");
  return {"batched_power_sgd", [state = std::move(state)](GradBucket& bucket) { return state->reduce(bucket, true); }};
}

// ---- saving

namespace {

// Calls visit(name, number) for all numbers of the state but its tensors.
template <class Visit>
void visit_options(PowerSgdOptions& o, const Visit& visit) {
  visit("rank", o.rank);
  visit("start_iteration", o.start_iteration);
  visit("min_compression_rate", o.min_compression_rate);
  visit("error_feedback", o.error_feedback);
  visit("warm_start", o.warm_start);
  visit("seed", o.seed);
}

}  // namespace

State PowerSgd::state_dict() const {
  if (debug_level() != DebugLevel::kOff)
    log_info("[power_sgd] the state is saved without a group: the wrapper that it is registered with has its own");
  State state;
  PowerSgdOptions options = options_;
  const auto save = [&]<class T>(const char* name, T value) {
    if constexpr (std::is_same_v<T, double>) {
      state.emplace_back(name, Tensor::scalar(value, DType::kF64));
    } else {
      state.emplace_back(name, Tensor::scalar(static_cast<int64_t>(value), DType::kI64));
    }
  };
  visit_options(options, save);
  save("iteration", now_.iteration);
  save("gradient_bytes", now_.gradient_bytes);
  save("sent_bytes", now_.sent_bytes);
  for (const auto& [key, memory] : now_.memories) {
    const std::string at = concat("matrix/", key);
    if (memory.error.defined()) state.emplace_back(at + "/error", memory.error);
    if (memory.q.defined()) state.emplace_back(at + "/q", memory.q);
  }
  return state;
}

void PowerSgd::load_state_dict(const State& state) {
  const auto load = [&]<class T>(const char* name, T& value) {
    for (const auto& [key, tensor] : state) {
      if (key != name) continue;
      value = static_cast<T>(tensor.template item<std::conditional_t<std::is_same_v<T, double>, double, int64_t>>());
      return;
    }
    throw InvalidArgument(concat("[power_sgd] the state has no ", name, "; is it one of PowerSgd::state_dict?"));
  };
  PowerSgdOptions options;
  Known known;
  visit_options(options, load);
  load("iteration", known.iteration);
  load("gradient_bytes", known.gradient_bytes);
  load("sent_bytes", known.sent_bytes);
  check(options);
  for (const auto& [name, tensor] : state) {
    size_t key = 0;
    char what = 0;
    if (std::sscanf(name.c_str(), "matrix/%zu/%c", &key, &what) != 2) continue;
    (what == 'e' ? known.memories[key].error : known.memories[key].q) = clone(tensor);
  }
  options_ = options;
  now_ = std::move(known);
  if (debug_level() != DebugLevel::kOff)
    log_info("[power_sgd] the state is loaded without a group: the wrapper that it is registered with has its own");
}

// Everything but the errors is saved: what other ranks' factors missed is their own.
std::string PowerSgd::save() const {
  comm::List list;
  for (const auto& [name, tensor] : state_dict()) {
    if (!name.ends_with("/error")) list.emplace_back(comm::List{name, tensor});
  }
  return comm::encode(list);
}

void PowerSgd::load(const std::string& saved) {
  State state;
  const comm::Value list = comm::decode(saved);
  for (const comm::Value& row : list.as<comm::List>()) {
    const auto& fields = row.as<comm::List>();
    state.emplace_back(fields[0].as<std::string>(), fields[1].as<Tensor>());
  }
  load_state_dict(state);
}

}  // namespace chorale::parallel
