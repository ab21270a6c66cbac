// Collectives as rows.
//
// Note [Gradients over ranks] What is differentiated is the sum of the losses of all ranks: the gradient of x on a rank
// is the derivative of that sum by this rank's x. It follows that the gradient of each collective is its transpose:
//   all_reduce(sum)      all_reduce(sum) of the gradients; of an average their average
//   all_gather           reduce_scatter(sum)
//   reduce_scatter(sum)  all_gather; of an average the same divided by the number of ranks
//   broadcast            reduce to the root, zeros elsewhere
//   reduce               broadcast from the root
//   all_to_all           all_to_all, with what is cut and what is put together exchanged
//   send                 receive from the destination
//   receive              send to the source
// Where every rank computes the same loss from the result, that sum has it once per rank; sharded tensors, which know
// that such values are one, have gradients of their own (sharding/redistribute.h).
#include "chorale/op/collective.h"

#include "chorale/base/error.h"
#include "chorale/kernel/collective_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/pending.h"
#include "chorale/op/kernels.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
bool is_pending(const Tensor& tensor) {
  return tensor.defined() && tensor.extension() && tensor.extension()->kind == op::Pending::kKind;
}

namespace op {
namespace {

using kernel::Collective;
using kernel::CollectiveAttrs;
using kernel::KernelArgs;

const char* name_of(Collective kind) {
  constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"};
  return kNames[static_cast<size_t>(kind)];
}

int64_t& size_at(Shape& sizes, int64_t dim) { return sizes[static_cast<size_t>(dim)]; }

void check_dim(const CollectiveAttrs& a, const Tensor& x, int64_t dim) {
  CHORALE_CHECK(dim >= 0 && dim < x.dims(), "[", name_of(a.kind), "] there is no dimension ", dim,
                " in a tensor of shape ", x.sizes());
}

void check_chunk(const CollectiveAttrs& a, const Tensor& x, int64_t dim) {
  check_dim(a, x, dim);
  const int64_t expected = chunk_of(a.whole, a.ranks, a.rank).size;
  CHORALE_CHECK(x.size(dim) == expected, "[", name_of(a.kind), "] rank ", a.rank, " of ", a.ranks, " has ", expected,
                " of ", a.whole, " elements along dimension ", dim, ", but its tensor has shape ", x.sizes());
}

void infer_collective(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<CollectiveAttrs>();
  const Tensor& x = args.in[0];
  CHORALE_CHECK(a.ranks > 0 && a.rank >= 0 && a.rank < a.ranks, "[", name_of(a.kind), "] there is no rank ", a.rank,
                " of ", a.ranks);
  Shape sizes = x.sizes();
  switch (a.kind) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
    case Collective::kReduce:
      break;
    case Collective::kAllGather:
      check_chunk(a, x, a.dim);
      size_at(sizes, a.dim) = a.whole;
      break;
    case Collective::kReduceScatter:
      check_dim(a, x, a.dim);
      size_at(sizes, a.dim) = chunk_of(x.size(a.dim), a.ranks, a.rank).size;
      break;
    case Collective::kAllToAll:
      check_chunk(a, x, a.other);
      check_dim(a, x, a.dim);
      CHORALE_CHECK(a.dim != a.other, "[all_to_all] dimension ", a.dim, " cannot be both cut and put together");
      size_at(sizes, a.other) = a.whole;
      size_at(sizes, a.dim) = chunk_of(x.size(a.dim), a.ranks, a.rank).size;
      break;
  }
  out[0].sizes = std::move(sizes);
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

// One view per rank of the chunks along a dimension.
std::vector<Tensor> chunks_of(const Tensor& x, int64_t dim, int64_t ranks) {
  std::vector<Tensor> chunks;
  for (int64_t r = 0; r < ranks; ++r) {
    const Chunk chunk = chunk_of(x.size(dim), ranks, r);
    Shape sizes = x.sizes();
    size_at(sizes, dim) = chunk.size;
    chunks.push_back(x.view_as(sizes, x.strides(), x.offset() + chunk.first * x.stride(dim)));
  }
  return chunks;
}

void copy_into(const Tensor& out, const Tensor& x) {
  if (out.elems() == 0 || out.raw() == x.raw()) return;  // a graph may let the result lie where the operand was
  Tensor target = out;
  launch(kTo, out.device(), {&x, 1}, CopyAttrs{out.dtype()}, {&target, 1});
}

comm::Work begin(const CollectiveAttrs& a, const comm::Group& group, const Tensor& x, const Tensor& out) {
  CHORALE_CHECK(group.size() == a.ranks && group.rank() == a.rank, "[", name_of(a.kind), "] it was made for rank ",
                a.rank, " of ", a.ranks, ", but the group has this one as rank ", group.rank(), " of ", group.size());
  const auto root = static_cast<int>(a.root);
  switch (a.kind) {
    case Collective::kAllReduce:
      copy_into(out, x);
      return group.all_reduce(out, a.factor == 1 ? comm::Reduction(a.reduce) : comm::premultiplied_sum(a.factor));
    case Collective::kAllGather:
      return group.all_gather(chunks_of(out, a.dim, a.ranks), x);
    case Collective::kReduceScatter:
      return group.reduce_scatter(out, chunks_of(x, a.dim, a.ranks), a.reduce);
    case Collective::kBroadcast:
      copy_into(out, x);
      return group.broadcast(out, root);
    case Collective::kReduce:
      copy_into(out, x);
      return group.reduce(out, root, a.reduce);
    case Collective::kAllToAll:
      return group.all_to_all(chunks_of(out, a.other, a.ranks), chunks_of(x, a.dim, a.ranks));
  }
  return {};
}

// Elsewhere than on the root a sum was only given away.
void finish(const CollectiveAttrs& a, const comm::Group& group, const Tensor& out) {
  if (a.kind != Collective::kReduce || group.group_rank(static_cast<int>(a.root)) == group.rank()) return;
  fill_with_zeros(out);
}

void run_collective(const KernelArgs& args) {
  const auto& a = args.attrs.get<CollectiveAttrs>();
  const comm::Group* group = group_of(args.in[1]);
  if (!group) return copy_into(args.out[0], args.in[0]);
  begin(a, *group, args.in[0], args.out[0]).wait();
  finish(a, *group, args.out[0]);
}

void start_collective(const KernelArgs& args) {
  const auto& a = args.attrs.get<CollectiveAttrs>();
  const comm::Group* group = group_of(args.in[1]);
  if (!group) return copy_into(args.out[0], args.in[0]);
  show_when_done(args.out[0], [&](const Tensor& bytes) { return begin(a, *group, args.in[0], bytes); });
}

void infer_wait(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  out[0] = {{x.sizes(), x.dtype(), x.device()}, x.strides(), true, 0, x.offset()};
}

void wait_collective(const KernelArgs& args) {
  if (is_pending(args.in[0])) static_cast<const Pending*>(args.in[0].extension())->work.wait();
}

Tensors gradient_of(const GradArgs& g) {
  const auto& a = g.attrs.get<CollectiveAttrs>();
  const Tensor &dy = g.dout[0], &group = g.in[1];
  CHORALE_CHECK(a.reduce == Reduce::kSum || a.reduce == Reduce::kAverage, "[", name_of(a.kind),
                "] only sums and averages over ranks have a gradient; detach() the tensor first");
  switch (a.kind) {
    case Collective::kAllReduce:
      if (a.factor != 1) return {mul(all_reduce(dy, group), a.factor), {}};
      return {all_reduce(dy, group, a.reduce), {}};
    case Collective::kAllGather:
      return {reduce_scatter(dy, group, a.dim), {}};
    case Collective::kReduceScatter: {
      const Tensor dx = all_gather(dy, group, a.dim, g.shape(0)[static_cast<size_t>(a.dim)]);
      return {a.reduce == Reduce::kAverage ? div(dx, a.ranks) : dx, {}};
    }
    case Collective::kBroadcast:
      return {reduce(dy, group, static_cast<int>(a.root)), {}};
    case Collective::kReduce:
      return {broadcast(dy, group, static_cast<int>(a.root)), {}};
    case Collective::kAllToAll:
      return {all_to_all(dy, group, a.other, a.dim, g.shape(0)[static_cast<size_t>(a.dim)]), {}};
  }
  return {};
}

Sample example(CollectiveAttrs attrs, const Shape& sizes) {
  attrs.whole = attrs.kind == Collective::kAllToAll    ? sizes[static_cast<size_t>(attrs.other)]
                : attrs.kind == Collective::kAllGather ? sizes[static_cast<size_t>(attrs.dim)]
                                                       : 0;
  return {.in = {sample(sizes), Tensor::from<int64_t>({0, 1}, {2})}, .attrs = attrs};
}

// What all of them are but name, samples and, of one, the kernel.
constexpr OpDef collective(const char* name, Samples samples, const char* formula,
                           kernel::Kernel cpu = run_collective) {
  return {.name = name,
          .inputs = "x, group",
          .attrs = attrs_of<CollectiveAttrs>,
          .dtypes = kAll,
          .infer = infer_collective,
          .cpu = cpu,
          .grad = gradient_of,
          .shard = kReplicateOnly,
          .saves = saves_in({1}),
          .samples = samples,
          .formula = formula};
}

constexpr OpDef kAllReduce = collective(
    "all_reduce",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kAllReduce}, {2, 3}),
              example({.kind = Collective::kAllReduce, .reduce = Reduce::kAverage}, {4})};
    },
    "the sum (average, …) of x over ranks");
constexpr OpDef kAllGather = collective(
    "all_gather",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kAllGather}, {2, 3}),
              example({.kind = Collective::kAllGather, .dim = 1}, {2, 3})};
    },
    "the x of all ranks, one behind the other along dim");
constexpr OpDef kReduceScatter = collective(
    "reduce_scatter",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kReduceScatter}, {3, 2}),
              example({.kind = Collective::kReduceScatter, .reduce = Reduce::kAverage, .dim = 1}, {3, 2})};
    },
    "this rank's chunk along dim of the sum over ranks");
constexpr OpDef kBroadcast = collective(
    "broadcast",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kBroadcast}, {2, 3})};
    },
    "the x of the root");
constexpr OpDef kReduce = collective(
    "reduce",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kReduce}, {2, 3})};
    },
    "the sum over ranks on the root, zeros elsewhere");
constexpr OpDef kAllToAll = collective(
    "all_to_all",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kAllToAll, .dim = 0, .other = 1}, {2, 3}),
              example({.kind = Collective::kAllToAll, .dim = 2, .other = 0}, {2, 1, 3})};
    },
    "chunk i along dim goes to rank i; what comes is put together along other");

constexpr OpDef kStart = collective(
    "collective_start",
    []() -> std::vector<Sample> {
      return {example({.kind = Collective::kAllReduce}, {2, 3}),
              example({.kind = Collective::kAllGather, .dim = 1}, {2, 3}),
              example({.kind = Collective::kReduceScatter, .dim = 1}, {2, 3}),
              example({.kind = Collective::kBroadcast}, {2, 3}),
              example({.kind = Collective::kAllToAll, .dim = 0, .other = 1}, {2, 3})};
    },
    "the collective `kind`, begun: collective_wait gives its result", start_collective);

constexpr OpDef kWait{
    .name = "collective_wait",
    .inputs = "pending",
    .dtypes = kAll,
    .infer = infer_wait,
    .cpu = wait_collective,
    .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
    .shard = kShardElementwise,
    .view = true,
    .samples = []() -> std::vector<Sample> {
      return {{.in = {sample({2, 3})}}};
    },
    .formula = "the result of a collective that was begun",
};

}  // namespace

Rows collective_rows();
Rows collective_rows() {
  static constexpr const OpDef* kRows[] = {&kAllReduce, &kAllGather, &kReduceScatter, &kBroadcast,
                                           &kReduce,    &kAllToAll,  &kStart,         &kWait};
  return kRows;
}

bool communicates(const OpDef& row) {
  return &row == &kWait || (row.attrs && (&row.attrs() == &attrs_of<CollectiveAttrs>() ||
                                          &row.attrs() == &attrs_of<kernel::MessageAttrs>()));
}

}  // namespace op

// ---- what users call

namespace {

using kernel::Collective;
using kernel::CollectiveAttrs;

CollectiveAttrs over(const Tensor& group, Collective kind) {
  const comm::Group* ranks = group_of(group);
  CollectiveAttrs attrs{.kind = kind};
  if (ranks) {
    attrs.ranks = ranks->size();
    attrs.rank = ranks->rank();
  }
  return attrs;
}

CollectiveAttrs reducing(const Tensor& group, Reduce reduce) {
  CollectiveAttrs attrs = over(group, Collective::kAllReduce);
  attrs.reduce = reduce;
  return attrs;
}
CollectiveAttrs gathering(const Tensor& x, const Tensor& group, int64_t dim, int64_t whole) {
  CollectiveAttrs attrs = over(group, Collective::kAllGather);
  attrs.dim = normalize_dim("all_gather", dim, x.dims());
  attrs.whole = whole >= 0 ? whole : x.size(dim) * attrs.ranks;
  return attrs;
}
CollectiveAttrs scattering(const Tensor& x, const Tensor& group, int64_t dim, Reduce reduce) {
  CollectiveAttrs attrs = over(group, Collective::kReduceScatter);
  attrs.dim = normalize_dim("reduce_scatter", dim, x.dims());
  attrs.reduce = reduce;
  return attrs;
}
CollectiveAttrs exchanging(const Tensor& x, const Tensor& group, int64_t cut, int64_t join, int64_t whole) {
  CollectiveAttrs attrs = over(group, Collective::kAllToAll);
  attrs.dim = normalize_dim("all_to_all", cut, x.dims());
  attrs.other = normalize_dim("all_to_all", join, x.dims());
  attrs.whole = whole >= 0 ? whole : x.size(join) * attrs.ranks;
  return attrs;
}
CollectiveAttrs rooted(const Tensor& group, Collective kind, int root) {
  CollectiveAttrs attrs = over(group, kind);
  if (const comm::Group* ranks = group_of(group)) ranks->group_rank(root);  // throws for a rank outside
  attrs.root = root;
  return attrs;
}

}  // namespace

Tensor all_reduce(const Tensor& x, const Tensor& group, Reduce reduce) {
  return op::call(op::kAllReduce, reducing(group, reduce), x, group);
}
Tensor all_gather(const Tensor& x, const Tensor& group, int64_t dim, int64_t whole) {
  return op::call(op::kAllGather, gathering(x, group, dim, whole), x, group);
}
Tensor reduce_scatter(const Tensor& x, const Tensor& group, int64_t dim, Reduce reduce) {
  return op::call(op::kReduceScatter, scattering(x, group, dim, reduce), x, group);
}
Tensor broadcast(const Tensor& x, const Tensor& group, int root) {
  return op::call(op::kBroadcast, rooted(group, Collective::kBroadcast, root), x, group);
}
Tensor reduce(const Tensor& x, const Tensor& group, int root) {
  return op::call(op::kReduce, rooted(group, Collective::kReduce, root), x, group);
}
Tensor all_to_all(const Tensor& x, const Tensor& group, int64_t cut, int64_t join, int64_t whole) {
  return op::call(op::kAllToAll, exchanging(x, group, cut, join, whole), x, group);
}

Tensor start_all_reduce(const Tensor& x, const Tensor& group, Reduce reduce) {
  return op::call(op::kStart, reducing(group, reduce), x, group);
}
Tensor start_average(const Tensor& x, const Tensor& group) {
  CollectiveAttrs attrs = reducing(group, Reduce::kSum);
  attrs.factor = 1.0 / static_cast<double>(attrs.ranks);
  return op::call(op::kStart, attrs, x, group);
}
Tensor start_all_gather(const Tensor& x, const Tensor& group, int64_t dim, int64_t whole) {
  return op::call(op::kStart, gathering(x, group, dim, whole), x, group);
}
Tensor start_reduce_scatter(const Tensor& x, const Tensor& group, int64_t dim, Reduce reduce) {
  return op::call(op::kStart, scattering(x, group, dim, reduce), x, group);
}
Tensor start_broadcast(const Tensor& x, const Tensor& group, int root) {
  return op::call(op::kStart, rooted(group, Collective::kBroadcast, root), x, group);
}
Tensor start_all_to_all(const Tensor& x, const Tensor& group, int64_t cut, int64_t join, int64_t whole) {
  return op::call(op::kStart, exchanging(x, group, cut, join, whole), x, group);
}
Tensor wait_for(const Tensor& pending) {
  // One that is traced may be begun; only running it tells.
  return is_pending(pending) || pending.is_traced() ? op::call(op::kWait, {}, pending) : pending;
}

void all_reduce_(const Tensor& x, const Tensor& group, Reduce reduce) { copy_(x, all_reduce(x, group, reduce)); }
void all_gather_into(const Tensor& out, const Tensor& x, const Tensor& group, int64_t dim) {
  op::need_defined("all_gather_into", "out", out);
  copy_(out, all_gather(x, group, dim, out.size(dim)));
}
void all_gather_into(const std::vector<Tensor>& outs, const Tensor& x, const Tensor& group) {
  op::need_defined("all_gather_into", "x", x);
  const Tensor all = all_gather(unsqueeze(x, 0), group);
  CHORALE_CHECK(all.size(0) == static_cast<int64_t>(outs.size()), "[all_gather] there are ", all.size(0),
                " ranks and tensors for ", outs.size());
  for (size_t i = 0; i < outs.size(); ++i) copy_(outs[i], select(all, 0, static_cast<int64_t>(i)));
}
void reduce_scatter_into(const Tensor& out, const Tensor& x, const Tensor& group, int64_t dim, Reduce reduce) {
  copy_(out, reduce_scatter(x, group, dim, reduce));
}
void all_to_all_into(const Tensor& out, const Tensor& x, const Tensor& group) {
  const comm::Group* ranks = group_of(group);
  const int64_t count = ranks ? ranks->size() : 1;
  CHORALE_CHECK(x.elems() % count == 0 && out.elems() == x.elems() && (x.dims() == 0 || x.size(0) % count == 0),
                "[all_to_all] a tensor of shape ", x.sizes(), " cannot be cut into ", count,
                " equal chunks for one of ", out.sizes());
  copy_(out, view(all_to_all(reshape(x, {count, x.elems() / count}), group, 0, 1), out.sizes()));
}

}  // namespace chorale
