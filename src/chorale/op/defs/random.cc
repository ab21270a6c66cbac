#include "chorale/op/random.h"

#include "chorale/kernel/cpu/random.h"
#include "chorale/kernel/random_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/device_scope.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale {
namespace op {
namespace {

using kernel::DrawAttrs;
using kernel::RandintAttrs;
using kernel::RandomAttrs;

template <class A>
void infer_sizes(const InferArgs& args, std::span<OutSpec> out) {
  const A& a = args.attrs.get<A>();
  out[0].sizes = a.sizes.shape();
  out[0].dtype = a.dtype;
  out[0].device = args.in[0].device();
}
void infer_real(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<RandomAttrs>();
  CHORALE_CHECK(is_floating(a.dtype), "[", args.op.name, "] gives floating numbers, not ", a.dtype);
  infer_sizes<RandomAttrs>(args, out);
}
void infer_uniform(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<RandomAttrs>();
  CHORALE_CHECK(a.a <= a.b, "[uniform] low ", a.a, " is above high ", a.b);
  infer_real(args, out);
}
void infer_normal(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<RandomAttrs>();
  CHORALE_CHECK(a.b >= 0, "[normal] a standard deviation cannot be negative: ", a.b);
  infer_real(args, out);
}
void infer_randint(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<RandintAttrs>();
  CHORALE_CHECK(a.low < a.high, "[randint] there is no integer from ", a.low, " to below ", a.high);
  const int64_t last = a.high - 1, exact = largest_exact_integer(a.dtype);
  const bool fits = is_integral(a.dtype) ? can_hold(a.dtype, a.low) && can_hold(a.dtype, last)
                                         : a.low >= (a.dtype == DType::kBool ? 0 : -exact) && last <= exact;
  CHORALE_CHECK(fits, "[randint] a tensor of ", a.dtype, " cannot hold all integers from ", a.low, " to ", last,
                "; draw them in i64");
  infer_sizes<RandintAttrs>(args, out);
}
void infer_randperm(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<RandintAttrs>();
  CHORALE_CHECK(a.sizes.size() == 1 && a.sizes[0] >= 0, "[randperm] a permutation has a length of at least 0");
  CHORALE_CHECK(a.sizes[0] <= 1 || a.sizes[0] - 1 <= largest_exact_integer(a.dtype), "[randperm] a tensor of ", a.dtype,
                " cannot hold all integers up to ", a.sizes[0] - 1, "; draw them in i64");
  infer_sizes<RandintAttrs>(args, out);
}
void infer_bernoulli(const InferArgs& args, std::span<OutSpec> out) {
  out[0].sizes = args.in[0].sizes();
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}
void infer_multinomial(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<DrawAttrs>();
  const Tensor& w = args.in[0];
  CHORALE_CHECK(w.dims() >= 1 && w.dims() <= 2 && w.size(-1) > 0,
                "[multinomial] weights must be [n] or [rows, n] with n > 0, found ", w.sizes());
  CHORALE_CHECK(a.count > 0 && (a.replacement || a.count <= w.size(-1)), "[multinomial] ", a.count, " draws ",
                a.replacement ? "with" : "without", " replacement from ", w.size(-1), " weights");
  out[0].sizes = w.sizes();
  out[0].sizes.back() = a.count;
  out[0].dtype = DType::kI64;
  out[0].device = w.device();
}

void ways_from_stretch(const ShardCall& call, ShardWays& ways) {
  ways.split(join({"S"}, {letters(static_cast<int64_t>(call.out[0].size()))}));
}
template <class A>
inline constexpr ShardRule kDrawsParts{.ways = ways_from_stretch, .stretch = 0, .local = with_result_sizes<A>};

// Rows whose only input is a stretch differ in a few fields only.
constexpr OpDef from_stretch(const char* name, const kernel::AttrsType& (*attrs)(), Infer infer, kernel::Kernel cpu,
                             const ShardRule& shard, Samples samples, const char* formula) {
  return {.name = name,
          .inputs = "stretch",
          .attrs = attrs,
          .dtypes = {DType::kI64},
          .infer = infer,
          .cpu = cpu,
          .grad = not_differentiable,
          .shard = shard,
          .samples = samples,
          .formula = formula};
}

constexpr OpDef kUniform = from_stretch(
    "uniform", attrs_of<RandomAttrs>, infer_uniform, kernel::cpu::uniform, kDrawsParts<RandomAttrs>,
    [] {
      return std::vector<Sample>{{.in = {sample_stretch(7)}, .attrs = RandomAttrs{.sizes = {2, 3}, .a = -1, .b = 2}},
                                 {.in = {sample_stretch(0)}, .attrs = RandomAttrs{.sizes = {}, .dtype = DType::kF64}}};
    },
    "uniform in [a, b)");
constexpr OpDef kNormal = from_stretch(
    "normal", attrs_of<RandomAttrs>, infer_normal, kernel::cpu::normal, kDrawsParts<RandomAttrs>,
    [] {
      return std::vector<Sample>{
          {.in = {sample_stretch(7)}, .attrs = RandomAttrs{.sizes = {5}, .a = 1, .b = 2, .dtype = DType::kBF16}},
          {.in = {sample_stretch(9)}, .attrs = RandomAttrs{.sizes = {3, 5}, .a = 1, .b = 2, .dtype = DType::kF64}}};
    },
    "normal with mean a and standard deviation b");
constexpr OpDef kRandint = from_stretch(
    "randint", attrs_of<RandintAttrs>, infer_randint, kernel::cpu::randint, kDrawsParts<RandintAttrs>,
    [] {
      return std::vector<Sample>{
          {.in = {sample_stretch(7)}, .attrs = RandintAttrs{.sizes = {3, 2}, .low = -2, .high = 9}}};
    },
    "uniform among low … high - 1");
constexpr OpDef kRandperm = from_stretch(
    "randperm", attrs_of<RandintAttrs>, infer_randperm, kernel::cpu::randperm, kReplicateOnly,
    [] { return std::vector<Sample>{{.in = {sample_stretch(7)}, .attrs = RandintAttrs{.sizes = {6}}}}; },
    "0 … n - 1 in random order");

constexpr OpDef kBernoulli{
    .name = "bernoulli",
    .inputs = "p, stretch",
    .dtypes = kFloats,
    .infer = infer_bernoulli,
    .cpu = kernel::cpu::bernoulli,
    .grad = not_differentiable,
    .shard = {.labels = "...,S->...", .stretch = 1},
    .samples =
        [] {
          return std::vector<Sample>{{.in = {sample({3, 4}, 0, 0, 1), sample_stretch(7)}}};
        },
    .formula = "1 with probability p[i], else 0",
};
constexpr OpDef kMultinomial{
    .name = "multinomial",
    .inputs = "weights, stretch",
    .attrs = attrs_of<DrawAttrs>,
    .dtypes = kFloats,
    .infer = infer_multinomial,
    .cpu = kernel::cpu::multinomial,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples =
        [] {
          // Weights that every floating type represents exactly, so that all of them draw the same.
          const Tensor weights = Tensor::from({1.0, 0.0, 2.0, 0.5, 4.0, 1.0, 0.25, 8.0}, {2, 4});
          return std::vector<Sample>{
              {.in = {weights, sample_stretch(7)}, .attrs = DrawAttrs{.count = 3, .replacement = false}},
              {.in = {weights, sample_stretch(8)}, .attrs = DrawAttrs{.count = 6, .replacement = true}}};
        },
    .formula = "positions drawn in proportion to their weights",
};

constexpr const OpDef* kRandomRows[] = {&kUniform, &kNormal, &kRandint, &kRandperm, &kBernoulli, &kMultinomial};

Tensor draw_reals(Generator& generator, const Shape& sizes, DType dtype, Device device) {
  return draw(generator, (count_elems(sizes) + 1) * kernel::cpu::words_per_element(dtype), device);
}
Tensor draw_integers(Generator& generator, const Shape& sizes, Device device) {
  return draw(generator, count_elems(sizes) * kernel::cpu::kWordsPerInteger, device);
}

}  // namespace

Rows random_rows() { return kRandomRows; }

}  // namespace op

Tensor draw(Generator& generator, int64_t words, Device device) { return op::current().draw(generator, words, device); }

Tensor uniform(const Shape& sizes, double low, double high, DType dtype, Generator& generator, Device device) {
  device = op::creation_device(device);
  return op::call(op::kUniform, op::RandomAttrs{sizes, low, high, dtype},
                  op::draw_reals(generator, sizes, dtype, device));
}
Tensor normal(const Shape& sizes, double mean, double stddev, DType dtype, Generator& generator, Device device) {
  device = op::creation_device(device);
  return op::call(op::kNormal, op::RandomAttrs{sizes, mean, stddev, dtype},
                  op::draw_reals(generator, sizes, dtype, device));
}
const Tensor& uniform_(const Tensor& x, double low, double high, Generator& generator) {
  op::need_defined("uniform_", "x", x);
  return op::call_into(op::kUniform, op::RandomAttrs{x.sizes(), low, high, x.dtype()}, x,
                       op::draw_reals(generator, x.sizes(), x.dtype(), x.device()));
}
const Tensor& normal_(const Tensor& x, double mean, double stddev, Generator& generator) {
  op::need_defined("normal_", "x", x);
  return op::call_into(op::kNormal, op::RandomAttrs{x.sizes(), mean, stddev, x.dtype()}, x,
                       op::draw_reals(generator, x.sizes(), x.dtype(), x.device()));
}
Tensor randint(int64_t low, int64_t high, const Shape& sizes, DType dtype, Generator& generator, Device device) {
  device = op::creation_device(device);
  return op::call(op::kRandint, op::RandintAttrs{sizes, low, high, dtype}, op::draw_integers(generator, sizes, device));
}
Tensor randperm(int64_t n, DType dtype, Generator& generator, Device device) {
  device = op::creation_device(device);
  CHORALE_CHECK(n >= 0, "[randperm] a length cannot be negative: ", n);
  return op::call(op::kRandperm, op::RandintAttrs{{n}, 0, 1, dtype}, op::draw_integers(generator, {n}, device));
}
Tensor bernoulli(const Tensor& p, Generator& generator) {
  op::need_defined("bernoulli", "p", p);
  return op::call(op::kBernoulli, {}, p, draw(generator, p.elems() + 1, p.device()));
}
Tensor multinomial(const Tensor& weights, int64_t count, bool replacement, Generator& generator) {
  op::need_defined("multinomial", "weights", weights);
  const int64_t n = weights.dims() > 0 ? weights.size(-1) : 1;
  const int64_t rows = n > 0 ? weights.elems() / n : 0;
  return op::call(op::kMultinomial, op::DrawAttrs{count, replacement}, weights,
                  draw(generator, 2 * rows * std::max(n, count), weights.device()));
}

}  // namespace chorale
