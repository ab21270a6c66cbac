#include "chorale/sharding/sharded.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "chorale/autograd/autograd.h"
#include "chorale/autograd/backward.h"
#include "chorale/autograd/shared_part.h"
#include "chorale/base/error.h"
#include "chorale/comm/mesh_places.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/random.h"
#include "chorale/op/reduce.h"
#include "chorale/op/view.h"
#include "chorale/sharding/explanation.h"
#include "chorale/sharding/redistribute.h"
#include "chorale/sharding/sharded_watch.h"

namespace chorale {

using sharding::Layout;
using sharding::layout_of;
using sharding::local_of;
using sharding::move_part;
using sharding::sharded;
using sharding::wrap;

namespace sharding {
namespace {

constinit thread_local bool implicit_replication = false;

struct LayoutHash {
  size_t operator()(const Layout& layout) const {
    size_t hash = layout.mesh.hash();
    for (const Placement& p : layout.placements) {
      const auto code = static_cast<size_t>(p.is_shard() ? 1 + p.dim() + 16 * p.pieces() : 0) +
                        (static_cast<size_t>(p.partial().reduce) << 20);
      hash = (hash ^ code) * 0x9e3779b97f4a7c15u;
    }
    return hash;
  }
};
struct LayoutEqual {
  bool operator()(const Layout& a, const Layout& b) const { return a.mesh == b.mesh && a.placements == b.placements; }
};

}  // namespace

constinit thread_local ShardedWatch* sharded_watch = nullptr;

bool replicates_implicitly() { return implicit_replication || autograd::BackwardRun::current(); }

std::shared_ptr<const Layout> layout_of(const Mesh& mesh, const Placements& placements) {
  // Weak, so that the groups of a mesh end with its tensors.
  thread_local std::unordered_map<size_t, std::vector<std::weak_ptr<const Layout>>> known;
  Layout wanted{mesh, placements};
  auto& alike = known[LayoutHash()(wanted)];
  std::erase_if(alike, [](const auto& entry) { return entry.expired(); });
  for (const auto& entry : alike) {
    if (auto found = entry.lock(); found && LayoutEqual()(*found, wanted)) return found;
  }
  auto made = std::make_shared<const Layout>(std::move(wanted));
  alike.push_back(made);
  return made;
}

std::string Sharded::why_no_bytes(const Tensor& tensor) const {
  return concat("a tensor of shape ", tensor.sizes(), " that is sharded as ", layout->placements, " over a ",
                layout->mesh,
                " has no elements of its own: to_local() gives this rank's part, full_tensor() all of it");
}

const Tensor& local_of(const Tensor& x) {
  const Sharded& known = sharded(x);
  if (is_pending(known.local)) [[unlikely]] {
    const NoGrad quiet;
    known.local = comm::with_places(known.layout->mesh, [&] { return wait_for(known.local); });
  }
  return known.local;
}

Tensor wrap(std::shared_ptr<const Layout> layout, const Shape& sizes, const Strides& strides, Tensor local) {
  const DType dtype = local.dtype();
  const Device device = local.device();
  base::Intrusive<Storage> storage = local.storage();
  Tensor result = Tensor::without_bytes(sizes, strides, dtype, device,
                                        std::make_unique<Sharded>(std::move(layout), std::move(local)));
  result.impl()->storage = std::move(storage);  // so that writes are counted in one place
  if (sharded_watch) [[unlikely]]
    sharded_watch->note_made(result);
  return result;
}

}  // namespace sharding

namespace {

const sharding::Sharded& sharded_or_throw(const char* call, const Tensor& x) {
  op::need_defined(call, "x", x);
  CHORALE_CHECK(x.is_sharded(), "[", call, "] the tensor of shape ", x.sizes(),
                " is not sharded: distribute() makes it so");
  return sharded(x);
}

// The same bytes without history. What is traced is wanted for as long as somebody has it, which an alias does not say.
Tensor other_handle(const Tensor& x) { return x.is_traced() ? detach(x) : x.alias(); }

// Gradients of parts are not partial: what is partial gets the whole one.
Placements gradient_placements(Placements placements) {
  for (Placement& p : placements) {
    if (p.is_partial()) p = {};
  }
  return placements;
}

// A part without history that shares nothing with x.
Tensor moved(const Tensor& x, const Placements& to, bool async = false) {
  const NoGrad quiet;
  sharding::watch_used(x);
  const Layout& from = *sharded(x).layout;
  Tensor local = move_part(local_of(x), x.sizes(), from.mesh, from.placements, to, async);
  if (is_pending(local)) return local;
  if (local.storage() == local_of(x).storage()) local = clone(local);
  return local.is_contiguous() || local.dims() == 0 ? local : contiguous(local);
}

Tensor moved_and_wrapped(const Tensor& x, const Placements& to, bool async = false) {
  Tensor local;
  if (sharding::explains()) [[unlikely]] {
    const comm::CommCounter sent;
    local = moved(x, to, async);
    sharding::explain_move(x, to, sent);
  } else {
    local = moved(x, to, async);
  }
  return wrap(layout_of(mesh_of(x), to), x.sizes(), contiguous_strides(x.sizes()), std::move(local));
}

class Redistribute final : public Function {
 public:
  Redistribute(Placements to, RedistributeOptions options) : to_(std::move(to)), options_(options) {}
  const char* name() const override { return "redistribute"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    from_ = placements_of(in[0]);
    dtype_ = in[0].dtype();
    const Tensor x = options_.forward_dtype ? chorale::to(in[0], *options_.forward_dtype) : in[0];
    return {moved_and_wrapped(x, to_, options_.async)};
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const Placements& now = placements_of(dout[0]);
    Placements target = from_;
    for (size_t m = 0; m < target.size(); ++m) {
      if (target[m].is_partial() && !now[m].is_partial()) target[m] = {};
    }
    // Begun only: backward goes on, and the op that reads the gradient waits.
    const RedistributeOptions options{
        .forward_dtype = options_.backward_dtype.value_or(dtype_), .backward_dtype = dout[0].dtype(), .async = true};
    const Tensor dx = apply<Redistribute>({dout[0]}, target, options)[0];
    return {dx.dtype() == dtype_ ? dx : chorale::to(dx, dtype_)};
  }

 private:
  Placements from_, to_;
  RedistributeOptions options_;
  DType dtype_ = DType::kF32;
};

class AlignGradient final : public Function {
 public:
  const char* name() const override { return "align_gradient"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    placements_ = gradient_placements(placements_of(in[0]));
    return {wrap(sharded(in[0]).layout, in[0].sizes(), in[0].strides(), sharded(in[0]).local)};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    if (placements_of(dout[0]) == placements_) return dout;
    return {apply<Redistribute>({dout[0]}, placements_, RedistributeOptions{.async = true})[0]};
  }

 private:
  Placements placements_;
};

class ToLocal final : public Function {
 public:
  explicit ToLocal(std::optional<Placements> gradient) : gradient_(std::move(gradient)) {}
  const char* name() const override { return "to_local"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    layout_ = sharded(in[0]).layout;
    sizes_ = in[0].sizes();
    return {other_handle(local_of(in[0]))};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const Placements placements = gradient_ ? *gradient_ : gradient_placements(layout_->placements);
    return {from_local(dout[0], layout_->mesh, placements, {.sizes = sizes_, .strides = contiguous_strides(sizes_)})};
  }

 private:
  std::optional<Placements> gradient_;
  std::shared_ptr<const Layout> layout_;
  Shape sizes_;
};

class FromLocal final : public Function {
 public:
  FromLocal(std::shared_ptr<const Layout> layout, Shape sizes, Strides strides, Placements gradient)
      : layout_(std::move(layout)),
        sizes_(std::move(sizes)),
        strides_(std::move(strides)),
        gradient_(std::move(gradient)) {}
  const char* name() const override { return "from_local"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    return {wrap(layout_, sizes_, strides_, other_handle(in[0]))};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    return {to_local(apply<Redistribute>({dout[0]}, gradient_, RedistributeOptions{})[0])};
  }

 private:
  std::shared_ptr<const Layout> layout_;
  Shape sizes_;
  Strides strides_;
  Placements gradient_;
};

// Everything about a part that must be the same on all ranks of a line, as numbers.
std::vector<int64_t> facts_of(const Tensor& x) {
  std::vector<int64_t> facts(2 * kMaxDims + 3, -1);
  facts[0] = static_cast<int64_t>(x.dtype());
  facts[1] = requires_grad(x);
  facts[2] = x.dims();
  for (size_t d = 0; d < x.sizes().size(); ++d) {
    facts[3 + d] = x.sizes()[d];
    facts[3 + kMaxDims + d] = x.strides()[d];
  }
  return facts;
}

void check_parts(const Tensor& local, const Mesh& mesh, const Placements& placements) {
  const NoGrad quiet;
  const std::vector<int64_t> own = facts_of(local);
  for (size_t m = 0; m < mesh.dims(); ++m) {
    const comm::Group& line = mesh.group(m);
    if (line.size() < 2) continue;
    std::vector<int64_t> all(own.size() * static_cast<size_t>(line.size()));
    comm::with_places(mesh, [&] { line.all_gather_into(std::span(all), std::span<const int64_t>(own)).wait(); });
    for (int r = 0; r < line.size(); ++r) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(own.size()) * r;
      const auto first = all.begin();
      const auto size = static_cast<std::ptrdiff_t>(own.size());
      CHORALE_CHECK(std::equal(begin, begin + size, first), "[from_local] parts differ in dtype, shape, strides or ",
                    "whether they ask for gradients: rank ", line.global_rank(r), " along ", m, " of a ", mesh,
                    " has another one than rank ", line.global_rank(0));
    }
    if (placements[m].is_replicate()) line.broadcast(local, line.global_rank(0)).wait();
  }
}

Tensor pad(const Tensor& x, int64_t dim, int64_t size) {
  if (x.size(dim) == size) return x;
  Shape sizes = x.sizes();
  sizes[static_cast<size_t>(dim)] = size;
  const Tensor padded = zeros(sizes, x.dtype(), x.device());
  copy_(narrow(padded, dim, 0, x.size(dim)), x);
  return padded;
}

// The chunks that rank `source` of the line has of its x, one to each rank.
Tensor scattered(const Tensor& x, const comm::Group& line, int64_t dim, int source) {
  const int64_t most = op::chunk_of(x.size(dim), line.size(), 0).size;
  Shape sizes = x.sizes();
  sizes[static_cast<size_t>(dim)] = most;
  const Tensor mine = empty(sizes, x.dtype(), x.device());
  std::vector<Tensor> chunks;
  if (line.rank() == source) {
    for (int r = 0; r < line.size(); ++r) {
      const op::Chunk chunk = op::chunk_of(x.size(dim), line.size(), r);
      chunks.push_back(contiguous(pad(narrow(x, dim, chunk.first, chunk.size), dim, most)));
    }
  }
  line.scatter(mine, chunks, line.global_rank(source)).wait();
  return clone(narrow(mine, dim, 0, op::chunk_of(x.size(dim), line.size(), line.rank()).size));
}

}  // namespace

const Mesh& mesh_of(const Tensor& x) { return sharded_or_throw("mesh_of", x).layout->mesh; }
const Placements& placements_of(const Tensor& x) { return sharded_or_throw("placements_of", x).layout->placements; }

Tensor distribute(const Tensor& x, const Mesh& mesh, const Placements& placements, std::optional<int> source) {
  op::need_defined("distribute", "x", x);
  const Placements target = sharding::checked("distribute", mesh, placements, x.dims());
  if (x.is_sharded()) {
    CHORALE_CHECK(mesh_of(x) == mesh, "[distribute] the tensor is sharded over another mesh: ", mesh_of(x),
                  ", and parts do not move between meshes");
    CHORALE_CHECK(placements_of(x) == target, "[distribute] the tensor is sharded as ", placements_of(x), ", not as ",
                  target, ": redistribute() it");
    return x;
  }
  CHORALE_CHECK(is_leaf(x), "[distribute] takes a leaf: a gradient would not find its way back; use from_local() and ",
                "redistribute()");
  // There are no values to send.
  if (x.device().type == DeviceType::kNull && source) return distribute(x, mesh, placements, std::nullopt);
  const bool wanted = requires_grad(x);
  const NoGrad quiet;
  Tensor local = detach(x);
  if (!mesh.is_member()) {
    local = zeros(x.dims() == 0 ? Shape{} : Shape{0}, x.dtype(), x.device());
  } else {
    Placements now(mesh.dims());
    for (size_t m = 0; m < mesh.dims(); ++m) {
      const comm::Group& line = mesh.group(m);
      const Placement& p = target[m];
      const Reduce kind = p.partial().reduce;
      CHORALE_CHECK(!p.is_partial() || kind == Reduce::kSum || kind == Reduce::kAverage, "[distribute] partial values ",
                    "can be made as sums and averages, not as ", p);
      Placements then = now;
      then[m] = p;
      CHORALE_CHECK(!source || (*source >= 0 && *source < line.size()), "[distribute] there is no rank ",
                    source.value_or(0), " among the ", line.size(), " along dimension ", m, " of a ", mesh);
      if (source && line.size() > 1 && p.is_shard() && !p.is_strided()) {
        local = comm::with_places(mesh, [&] { return scattered(local, line, p.dim(), *source); });
      } else {
        if (source && line.size() > 1) {
          local = clone(contiguous(local));
          comm::with_places(mesh, [&] { line.broadcast(local, line.global_rank(*source)).wait(); });
        }
        local = move_part(local, x.sizes(), mesh, now, then);
      }
      now = then;
    }
    if (local.storage() == x.storage()) local = clone(local);
    local = contiguous(local);
  }
  Tensor result = wrap(layout_of(mesh, target), x.sizes(), contiguous_strides(x.sizes()), std::move(local));
  if (wanted) set_requires_grad(result);
  return result;
}

Tensor from_local(const Tensor& local, const Mesh& mesh, const Placements& placements,
                  const FromLocalOptions& options) {
  op::need_defined("from_local", "local", local);
  CHORALE_CHECK(!local.is_sharded(), "[from_local] the part is a sharded tensor itself: pass to_local() of it");
  CHORALE_CHECK(options.sizes.has_value() == options.strides.has_value(), "[from_local] the shape and the strides of ",
                "the whole are given together or not at all");
  const int64_t dims = options.sizes ? static_cast<int64_t>(options.sizes->size()) : local.dims();
  const Placements target = sharding::checked("from_local", mesh, placements, dims);
  Shape sizes = options.sizes ? *options.sizes : local.sizes();
  if (!options.sizes) {
    for (size_t m = 0; m < mesh.dims(); ++m) {
      if (target[m].is_shard()) sizes[static_cast<size_t>(target[m].dim())] *= mesh.shape()[m];
    }
  }
  const auto layout = layout_of(mesh, target);
  if (mesh.is_member()) {
    const Shape expected = sharding::own_part(sizes, *layout).sizes;
    CHORALE_CHECK(local.sizes() == expected, "[from_local] of a tensor of shape ", sizes, " placed as ", target,
                  " over a ", mesh, ", this rank has a part of shape ", expected, ", but was given ", local.sizes());
    if (options.check) check_parts(local, mesh, target);
  }
  const Strides strides = options.strides ? *options.strides : sharding::whole_strides(sizes, local);
  const Placements gradient = options.grad_placements
                                  ? sharding::checked("from_local", mesh, *options.grad_placements, dims)
                                  : gradient_placements(target);
  Tensor part = local;
  if (!mesh.is_member()) part = zeros(dims == 0 ? Shape{} : Shape{0}, local.dtype(), local.device());
  return apply<FromLocal>({part}, layout, sizes, strides, gradient)[0];
}

Tensor to_local(const Tensor& x, const std::optional<Placements>& grad_placements) {
  sharded_or_throw("to_local", x);
  sharding::watch_used(x);
  if (!grad_enabled() || !requires_grad(x)) return local_of(x);
  std::optional<Placements> gradient;
  if (grad_placements) gradient = sharding::checked("to_local", mesh_of(x), *grad_placements, x.dims());
  const Tensor part = apply<ToLocal>({x}, gradient)[0];
  autograd::mark_shared(part, x);
  return part;
}

Tensor redistribute(const Tensor& x, const Placements& placements, const RedistributeOptions& options) {
  sharded_or_throw("redistribute", x);
  const Placements target = sharding::checked("redistribute", mesh_of(x), placements, x.dims());
  for (size_t m = 0; m < target.size(); ++m) {
    CHORALE_CHECK(!target[m].is_partial() || target[m] == placements_of(x)[m], "[redistribute] from ", placements_of(x),
                  " to ", target, ": partial values come from ops, they cannot be asked for");
  }
  if (target == placements_of(x) && !options.forward_dtype && !options.backward_dtype) return x;
  return apply<Redistribute>({x}, target, options)[0];
}

Tensor align_gradient(const Tensor& x) {
  sharded_or_throw("align_gradient", x);
  return apply<AlignGradient>({x})[0];
}

Tensor full_tensor(const Tensor& x, const std::optional<Placements>& grad_placements) {
  sharded_or_throw("full_tensor", x);
  return to_local(redistribute(x, Placements(mesh_of(x).dims())), grad_placements);
}

// ---- out of nothing

Tensor empty(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype) {
  const Placements target = sharding::checked("empty", mesh, placements, static_cast<int64_t>(sizes.size()));
  const auto layout = layout_of(mesh, target);
  return wrap(layout, sizes, contiguous_strides(sizes),
              Tensor::empty(sharding::own_part(sizes, *layout).sizes, dtype, mesh.device()));
}
Tensor full(const Shape& sizes, Scalar value, const Mesh& mesh, const Placements& placements, DType dtype) {
  const Tensor x = empty(sizes, mesh, placements, dtype);
  fill_(x, value);
  return x;
}
Tensor zeros(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype) {
  return full(sizes, 0, mesh, placements, dtype);
}
Tensor ones(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype) {
  return full(sizes, 1, mesh, placements, dtype);
}
Tensor uniform(const Shape& sizes, const Mesh& mesh, const Placements& placements, double low, double high, DType dtype,
               Generator& generator) {
  const Tensor x = empty(sizes, mesh, placements, dtype);
  return uniform_(x, low, high, generator);
}
Tensor normal(const Shape& sizes, const Mesh& mesh, const Placements& placements, double mean, double stddev,
              DType dtype, Generator& generator) {
  const Tensor x = empty(sizes, mesh, placements, dtype);
  return normal_(x, mean, stddev, generator);
}

bool equal_sharded(const Tensor& a, const Tensor& b) {
  sharded_or_throw("equal_sharded", a);
  sharded_or_throw("equal_sharded", b);
  CHORALE_CHECK(mesh_of(a) == mesh_of(b), "[equal] the tensors are sharded over different meshes: ", mesh_of(a),
                " and ", mesh_of(b));
  if (!(a.sizes() == b.sizes())) return false;
  const Mesh& mesh = mesh_of(a);
  if (!mesh.is_member()) return true;
  const NoGrad quiet;
  const Tensor left = to_local(a), right = to_local(redistribute(b, placements_of(a)));
  int32_t same = left.elems() == 0 || all(eq(left, right)).item<bool>();
  for (size_t m = 0; m < mesh.dims(); ++m) {
    if (mesh.shape()[m] > 1)
      comm::with_places(mesh, [&] { mesh.group(m).all_reduce(std::span(&same, 1), Reduce::kMin).wait(); });
  }
  return same != 0;
}

std::vector<Tensor> local_map(const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& function,
                              const std::vector<Tensor>& args, const std::vector<Placements>& in,
                              const std::vector<Placements>& out) {
  CHORALE_CHECK(args.size() == in.size() && !args.empty(), "[local_map] ", args.size(), " arguments and ", in.size(),
                " placements for them");
  std::vector<Tensor> parts;
  for (size_t i = 0; i < args.size(); ++i) parts.push_back(to_local(redistribute(args[i], in[i])));
  const std::vector<Tensor> results = function(parts);
  CHORALE_CHECK(results.size() == out.size(), "[local_map] the function returned ", results.size(), " tensors for ",
                out.size(), " placements");
  std::vector<Tensor> wholes;
  for (size_t i = 0; i < results.size(); ++i) wholes.push_back(from_local(results[i], mesh_of(args[0]), out[i]));
  return wholes;
}

ImplicitReplication::ImplicitReplication() : before_(std::exchange(sharding::implicit_replication, true)) {}
ImplicitReplication::~ImplicitReplication() { sharding::implicit_replication = before_; }

}  // namespace chorale
