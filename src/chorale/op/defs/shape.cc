// Rows of the ops that arrange elements anew.
#include "chorale/op/shape.h"

#include <algorithm>
#include <string>

#include "chorale/kernel/cpu/image/pad.h"
#include "chorale/kernel/cpu/shape.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

// An empty vector is left out of a cat, whatever the others' number of dimensions.
bool is_nothing(const Shape& sizes) { return sizes.size() == 1 && sizes[0] == 0; }

DType promote_all(std::span<const Tensor> in) {
  DType dtype = in[0].dtype();
  for (const Tensor& x : in) dtype = promote(dtype, x.dtype());
  return dtype;
}

void infer_cat(const InferArgs& args, std::span<OutSpec> out) {
  CHORALE_CHECK(!args.in.empty(), "[cat] needs at least one tensor");
  const auto* model = std::find_if(args.in.data(), args.in.data() + args.in.size(),
                                   [](const Tensor& x) { return !is_nothing(x.sizes()); });
  if (model == args.in.data() + args.in.size()) model = args.in.data();
  CHORALE_CHECK(model->dims() > 0, "[cat] scalars have no dimension to be joined along; use stack");
  const auto dim = static_cast<size_t>(normalize_dim("cat", args.attrs.get<DimAttrs>().dim, model->dims()));
  Shape sizes = model->sizes();
  sizes[dim] = 0;
  for (size_t i = 0; i < args.in.size(); ++i) {
    const Shape& x = args.in[i].sizes();
    if (is_nothing(x)) continue;
    bool fits = x.size() == sizes.size();
    for (size_t d = 0; fits && d < x.size(); ++d) fits = d == dim || x[d] == sizes[d];
    CHORALE_CHECK(fits, "[cat] input ", i, " of shape ", x, " does not fit ", model->sizes(), " along dimension ", dim,
                  ": all other sizes must agree");
    sizes[dim] += x[dim];
  }
  out[0].sizes = std::move(sizes);
  out[0].dtype = promote_all(args.in);
  out[0].device = args.in[0].device();
}

void infer_stack(const InferArgs& args, std::span<OutSpec> out) {
  CHORALE_CHECK(!args.in.empty(), "[stack] needs at least one tensor");
  Shape sizes = args.in[0].sizes();
  for (size_t i = 0; i < args.in.size(); ++i) {
    CHORALE_CHECK(args.in[i].sizes() == sizes, "[stack] input ", i, " has shape ", args.in[i].sizes(),
                  ", the first has ", sizes, "; they must agree");
  }
  CHORALE_CHECK(sizes.size() < kMaxDims, "[stack] tensors of shape ", sizes, " have no room for another dimension");
  const int64_t dim = normalize_dim("stack", args.attrs.get<DimAttrs>().dim, args.in[0].dims() + 1);
  sizes.insert(static_cast<size_t>(dim), static_cast<int64_t>(args.in.size()));
  out[0].sizes = std::move(sizes);
  out[0].dtype = promote_all(args.in);
  out[0].device = args.in[0].device();
}

// abC,abC->abC and ab,ab->aZb.
void ways_cat(const ShardCall& call, ShardWays& ways) {
  const std::string y = keep_whole(letters(static_cast<int64_t>(call.out[0].size())), call.attrs.get<DimAttrs>().dim);
  std::vector<std::string> xs;
  for (const Tensor& x : call.in) xs.push_back(is_nothing(x.sizes()) ? "Z" : y);
  ways.split(join(xs, {y}));
}
void ways_stack(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(0));
  const int64_t dim = normalize_dim("stack", call.attrs.get<DimAttrs>().dim, call.dims(0) + 1);
  ways.split(
      join(std::vector<std::string>(call.in.size(), x), {std::string(x).insert(static_cast<size_t>(dim), 1, 'Z')}));
}

void infer_same(const InferArgs& args, std::span<OutSpec> out) {
  out[0].sizes = args.in[0].sizes();
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}

Shape padded_sizes(const char* name, const Shape& from, const PadAttrs& a) {
  CHORALE_CHECK(a.pads.size() % 2 == 0 && a.pads.size() / 2 <= from.size(), "[", name, "] pads ", a.pads.shape(),
                " must be pairs, for at most the ", from.size(), " dimensions of shape ", from);
  Shape sizes = from;
  for (size_t i = 0; i < a.pads.size() / 2; ++i) {
    const int64_t before = a.pads[2 * i], after = a.pads[2 * i + 1];
    int64_t& size = sizes[sizes.size() - 1 - i];
    if (a.mode != PadMode::kConstant && (before != 0 || after != 0)) {
      CHORALE_CHECK(before >= 0 && after >= 0, "[", name, "] only constant padding can crop; found pads ",
                    a.pads.shape());
      const int64_t most = a.mode == PadMode::kReflect ? size - 1 : size > 0 ? std::max(before, after) : 0;
      CHORALE_CHECK(before <= most && after <= most, "[", name, "] pads ", before, " and ", after,
                    " are too wide for size ", size, " of shape ", from, ": nothing to ",
                    a.mode == PadMode::kReflect ? "reflect" : "repeat");
    }
    size += before + after;
    CHORALE_CHECK(size >= 0, "[", name, "] pads ", a.pads.shape(), " crop more than there is in shape ", from);
  }
  return sizes;
}

void infer_pad(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<PadAttrs>();
  check_held("pad", args.in[0].dtype(), a.value);
  infer_same(args, out);
  out[0].sizes = padded_sizes("pad", args.in[0].sizes(), a);
}

// Pads are fewer than the gradient's own sizes, so those of x follow.
void infer_pad_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<PadAttrs>();
  PadAttrs crop{a.pads, PadMode::kConstant, 0};
  for (int64_t& pad : crop.pads.values) pad = -pad;
  infer_same(args, out);
  out[0].sizes = padded_sizes("pad_backward", args.in[0].sizes(), crop);
  padded_sizes("pad_backward", out[0].sizes, a);
}

// Dimensions without borders may be split.
std::string labels_pad(const ShardCall& call) {
  const IntList& pads = call.attrs.get<PadAttrs>().pads;
  std::string x = letters(call.dims(0));
  for (size_t i = 0; i < pads.size() / 2; ++i) {
    if (pads[2 * i] != 0 || pads[2 * i + 1] != 0) x = keep_whole(x, -1 - static_cast<int64_t>(i));
  }
  return join({x}, {x});
}
void ways_pad(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<PadAttrs>();
  ways.split(labels_pad(call));
  if (a.mode != PadMode::kConstant || a.value.is_zero()) ways.pass(linear_in({0}));
}
void ways_pad_backward(const ShardCall& call, ShardWays& ways) { ways.split(labels_pad(call)); }

void ways_roll(const ShardCall& call, ShardWays& ways) {
  const std::string x = keep_whole(letters(call.dims(0)), call.attrs.get<RollAttrs>().dim);
  ways.split(join({x}, {x}));
}

void infer_roll(const InferArgs& args, std::span<OutSpec> out) {
  normalize_dim("roll", args.attrs.get<RollAttrs>().dim, args.in[0].dims());
  infer_same(args, out);
}

void infer_triangle(const InferArgs& args, std::span<OutSpec> out) {
  CHORALE_CHECK(args.in[0].dims() >= 2, "[triangle] needs a matrix or a batch of them, found shape ",
                args.in[0].sizes());
  infer_same(args, out);
}

void infer_one_hot(const InferArgs& args, std::span<OutSpec> out) {
  const int64_t classes = args.attrs.get<OneHotAttrs>().classes;
  CHORALE_CHECK(classes > 0 || (classes == 0 && args.in[0].elems() == 0), "[one_hot] ", classes,
                " classes are not enough for an index of shape ", args.in[0].sizes());
  infer_same(args, out);
  out[0].dtype = DType::kI64;
  out[0].sizes.push_back(classes);
}

std::vector<Sample> samples_pad() {
  return {{{sample({3})}, PadAttrs{{1, 2}, PadMode::kConstant, 0.5}},
          {{sample({2, 3, 4})}, PadAttrs{{1, 0, -1, 2}, PadMode::kConstant, 0}},
          {{sample({2, 4})}, PadAttrs{{1, 2}, PadMode::kReflect, 0}},
          {{sample({3, 3, 2})}, PadAttrs{{1, 1, 2, 1}, PadMode::kReflect, 0}},
          {{sample({2, 3})}, PadAttrs{{2, 1, 0, 3}, PadMode::kReplicate, 0}},
          {{sample({2, 2, 2, 2})}, PadAttrs{{1, 0, 0, 1, 1, 1}, PadMode::kReplicate, 0}}};
}

std::vector<Sample> samples_triangle() {
  return {{{sample({3, 3})}, TriangleAttrs{0}},
          {{sample({2, 3, 4})}, TriangleAttrs{1}},
          {{sample({4, 2})}, TriangleAttrs{-2}}};
}

}  // namespace

constinit const OpDef kCat{
    .name = "cat",
    .inputs = "xs...",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_cat,
    .cpu = kernel::cpu::cat,
    .grad = [](const GradArgs& g) -> Tensors {
      Tensors din;
      const int64_t dim = normalize_dim("cat", g.attrs.get<DimAttrs>().dim, g.dout[0].dims());
      int64_t at = 0;
      for (size_t i = 0; i < g.in.size(); ++i) {
        const Shape sizes = g.shape(i);
        const int64_t length = is_nothing(sizes) ? 0 : sizes[static_cast<size_t>(dim)];
        din.push_back(g.needs(i) && !is_nothing(sizes) ? slice(g.dout[0], dim, at, at + length) : Tensor{});
        at += length;
      }
      return din;
    },
    .shard = {.ways = ways_cat},
    .linear = kLinearInEach,
    .saves = kSavesSpecs,
    .autocast = Cast::kWidest,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 3}), sample({1, 3}, 1)}, DimAttrs{0}},
              {{sample({2, 1, 3}), sample({2, 2, 3}, 1), sample({2, 4, 3}, 2)}, DimAttrs{-2}},
              {{sample({4})}, DimAttrs{0}}};
    },
    .formula = "xs one behind the other along dim",
};

constinit const OpDef kStack{
    .name = "stack",
    .inputs = "xs...",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kAll,
    .infer = infer_stack,
    .cpu = kernel::cpu::stack,
    .grad = [](const GradArgs& g) -> Tensors {
      Tensors din;
      for (size_t i = 0; i < g.in.size(); ++i) {
        din.push_back(g.needs(i) ? select(g.dout[0], g.attrs.get<DimAttrs>().dim, static_cast<int64_t>(i)) : Tensor{});
      }
      return din;
    },
    .shard = {.ways = ways_stack},
    .linear = kLinearInEach,
    .autocast = Cast::kWidest,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 3}), sample({2, 3}, 1)}, DimAttrs{0}},
              {{sample({2, 3}), sample({2, 3}, 1), sample({2, 3}, 2)}, DimAttrs{-1}},
              {{sample({}), sample({}, 1)}, DimAttrs{0}}};
    },
    .formula = "xs along a new dimension",
};

constinit const OpDef kPad{
    .name = "pad",
    .inputs = "x",
    .attrs = attrs_of<PadAttrs>,
    .dtypes = kAll,
    .infer = infer_pad,
    .cpu = kernel::cpu::pad,
    .grad = [](const GradArgs& g) -> Tensors {
      PadAttrs a = g.attrs.get<PadAttrs>();
      if (a.mode != PadMode::kConstant) return {call(kPadBackward, a, g.dout[0])};
      for (int64_t& entry : a.pads.values) entry = -entry;
      return {pad(g.dout[0], a.pads)};
    },
    .shard = {.ways = ways_pad},
    .samples = samples_pad,
    .formula = "x with borders, two entries of pads per dimension from the last backwards",
};

constinit const OpDef kPadBackward{
    .name = "pad_backward",
    .inputs = "dy",
    .attrs = attrs_of<PadAttrs>,
    .dtypes = kAll,
    .infer = infer_pad_backward,
    .cpu = kernel::cpu::pad_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<PadAttrs>();
      return {pad(g.dout[0], a.pads, a.mode)};
    },
    .shard = {.ways = ways_pad_backward},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 7})}, PadAttrs{{1, 2}, PadMode::kReflect, 0}},
              {{sample({5, 6})}, PadAttrs{{2, 1, 0, 3}, PadMode::kReplicate, 0}},
              {{sample({2, 5, 3})}, PadAttrs{{0, 0, 1, 1}, PadMode::kReflect, 0}}};
    },
    .formula = "dx, each element the sum of what was copied from it (reflect, replicate)",
};

constinit const OpDef kRoll{
    .name = "roll",
    .inputs = "x",
    .attrs = attrs_of<RollAttrs>,
    .dtypes = kAll,
    .infer = infer_roll,
    .cpu = kernel::cpu::roll,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<RollAttrs>();
      return {call(kRoll, RollAttrs{a.dim, -a.shift}, g.dout[0])};
    },
    .shard = {.ways = ways_roll},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5})}, RollAttrs{0, 2}},
              {{sample({2, 3, 4})}, RollAttrs{-2, -4}},
              {{sample({2, 3})}, RollAttrs{1, 0}}};
    },
    .formula = "x shifted along dim, around the end",
};

constinit const OpDef kTril{
    .name = "tril",
    .inputs = "x",
    .attrs = attrs_of<TriangleAttrs>,
    .dtypes = kAll,
    .infer = infer_triangle,
    .cpu = kernel::cpu::tril,
    .grad = [](const GradArgs& g) -> Tensors { return {tril(g.dout[0], g.attrs.get<TriangleAttrs>().diagonal)}; },
    .shard = {.labels = "...MN->...MN"},
    .linear = linear_in({0}),
    .samples = samples_triangle,
    .formula = "each matrix of x at and below a diagonal, 0 above",
};

constinit const OpDef kTriu{
    .name = "triu",
    .inputs = "x",
    .attrs = attrs_of<TriangleAttrs>,
    .dtypes = kAll,
    .infer = infer_triangle,
    .cpu = kernel::cpu::triu,
    .grad = [](const GradArgs& g) -> Tensors { return {triu(g.dout[0], g.attrs.get<TriangleAttrs>().diagonal)}; },
    .shard = {.labels = "...MN->...MN"},
    .linear = linear_in({0}),
    .samples = samples_triangle,
    .formula = "each matrix of x at and above a diagonal, 0 below",
};

constinit const OpDef kOneHot{
    .name = "one_hot",
    .inputs = "index",
    .attrs = attrs_of<OneHotAttrs>,
    .dtypes = {DType::kI64, DType::kI32},
    .infer = infer_one_hot,
    .cpu = kernel::cpu::one_hot,
    .grad = not_differentiable,
    .shard = {.labels = "...->...C"},
    .samples = []() -> std::vector<Sample> {
      return {{{sample_ints({4}, 0, 3)}, OneHotAttrs{3}}, {{sample_ints({2, 3}, 0, 4, 1)}, OneHotAttrs{5}}};
    },
    .formula = "zeros with a one at each index, along a new last dimension",
};

constinit const OpDef kRepeatInterleave{
    .name = "repeat_interleave",
    .inputs = "repeats",
    .dtypes = {DType::kI64, DType::kI32},
    .cpu = kernel::cpu::repeat_interleave,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample_ints({5}, 0, 3)}}, {{sample_ints({1}, 0, 3)}}};
    },
    .formula = "the index i, repeats[i] times",
};

Rows shape_rows() {
  static constexpr const OpDef* kRows[] = {&kCat,  &kStack, &kPad,    &kPadBackward,     &kRoll,
                                           &kTril, &kTriu,  &kOneHot, &kRepeatInterleave};
  return kRows;
}

}  // namespace chorale::op
