#include "chorale/sharding/builder.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "chorale/autograd/mode.h"
#include "chorale/base/error.h"
#include "chorale/comm/mesh_places.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/lists.h"
#include "chorale/op/prepare.h"
#include "chorale/op/shape.h"
#include "chorale/sharding/costs.h"
#include "chorale/sharding/decision.h"
#include "chorale/sharding/explanation.h"
#include "chorale/sharding/redistribute.h"
#include "chorale/sharding/sharded.h"
#include "chorale/sharding/sharded_watch.h"

namespace chorale::sharding {
namespace {

using op::OpDef;

// Every op of every program asks this: it must cost next to nothing.
bool any_sharded(std::span<const Tensor> tensors) {
  for (const Tensor& x : tensors) {  // NOLINT(readability-use-anyofallof): a library call per op shows
    const Tensor::Impl* impl = x.impl();
    if (impl && impl->extension && impl->extension->kind == TensorExtension::Kind::kSharded) [[unlikely]]
      return true;
  }
  return false;
}

// ---- decisions that were made before, on this thread

struct Operand {
  std::shared_ptr<const Layout> layout;  // null: whole, or absent
  Shape sizes;
  Strides strides;
  DType dtype = DType::kF32;
  bool defined = false;

  explicit Operand(const Tensor& x) : defined(x.defined()) {
    if (!defined) return;
    sizes = x.sizes();
    strides = x.strides();
    dtype = x.dtype();
    if (x.is_sharded()) layout = sharded(x).layout;
  }
  bool is(const Tensor& x) const {
    if (defined != x.defined()) return false;
    if (!defined) return true;
    const Layout* where = x.is_sharded() ? sharded(x).layout.get() : nullptr;
    return where == layout.get() && x.dtype() == dtype && x.sizes() == sizes && x.strides() == strides;
  }
};

struct Remembered {
  const OpDef* op;
  Attrs attrs;
  std::vector<Operand> in, into;
  std::shared_ptr<const Decision> decision;
};

size_t hash_of(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> into) {
  size_t hash = reinterpret_cast<uintptr_t>(&op);
  const auto mix = [&](size_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15u; };
  mix(attrs.hash());
  const auto add = [&](const Tensor& x) {
    if (!x.defined()) return mix(1);
    mix(x.is_sharded() ? reinterpret_cast<uintptr_t>(sharded(x).layout.get()) : 2);
    for (const int64_t n : x.sizes()) mix(static_cast<size_t>(n));
    mix(static_cast<size_t>(x.dtype()));
  };
  for (const Tensor& x : in) add(x);
  mix(into.size());
  for (const Tensor& x : into) add(x);
  return hash ^ hash >> 29;
}

bool fits(const Remembered& known, const OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
          std::span<const Tensor> into) {
  if (known.op != &op || known.in.size() != in.size() || known.into.size() != into.size() || !(known.attrs == attrs))
    return false;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!known.in[i].is(in[i])) return false;
  }
  for (size_t i = 0; i < into.size(); ++i) {
    if (!known.into[i].is(into[i])) return false;
  }
  return true;
}

constexpr size_t kMostRemembered = 4096;

// What one thread remembers.
struct Memory {
  std::unordered_map<size_t, std::vector<Remembered>> known;
  size_t count = 0;
  const CostModel* decided_by = nullptr;
};
Memory& memory_of_decisions() {
  thread_local Memory memory;
  return memory;
}

std::shared_ptr<const Decision> decision_for(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                                             size_t outputs, std::span<const Tensor> into) {
  auto& [known, count, decided_by] = memory_of_decisions();
  if (decided_by != &cost_model()) [[unlikely]] {
    known.clear();
    count = 0;
    decided_by = &cost_model();
  }
  const size_t hash = hash_of(op, in, attrs, into) + (replicates_implicitly() ? 1 : 0);
  if (const auto found = known.find(hash); found != known.end()) {
    for (const Remembered& entry : found->second) {
      if (fits(entry, op, in, attrs, into)) return entry.decision;
    }
  }
  auto made = std::make_shared<const Decision>(decide(op, in, attrs, outputs, into));
  if (op.shard.replicate && made->cost > 0) warn_of_gathering(op, in, made->cost);
  if (++count > kMostRemembered) {
    known.clear();
    count = 1;
  }
  Remembered entry{&op, attrs, {}, {}, made};
  for (const Tensor& x : in) entry.in.emplace_back(x);
  for (const Tensor& x : into) entry.into.emplace_back(x);
  known[hash].push_back(std::move(entry));
  return made;
}

// ---- running

void note_operands(std::span<const Tensor> operands) {
  if (!sharded_watch) [[likely]]
    return;
  for (const Tensor& x : operands) {
    if (x.defined() && x.is_sharded()) sharded_watch->note_used(x);
  }
}

Tensor stretch_for(const Tensor& stretch, const std::vector<int64_t>& place) {
  if (place.empty()) return stretch;
  const Tensor own = Tensor::from(place, {static_cast<int64_t>(place.size())}, stretch.device());
  return cat({stretch, watch_constant(own)}, 0);
}

// The operands of this rank. What has to move is begun first, all of it, and then waited for.
Tensors parts_for(const OpDef& op, std::span<const Tensor> in, const Decision& decision) {
  Tensors parts;
  parts.resize(in.size());
  bool any_moves = false;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined()) continue;
    if (op.shard.stretch == static_cast<int>(i)) {
      parts[i] = stretch_for(in[i], decision.stretch);
    } else if (!decision.moves[i]) [[likely]] {
      // A view of what is still on its way waits for nothing.
      const bool waits = !op.view || op.cpu;
      parts[i] = !in[i].is_sharded() ? in[i] : waits ? local_of(in[i]) : sharded(in[i]).local;
    } else {
      const Mesh& mesh = decision.mesh->mesh;
      const Placements now = in[i].is_sharded() ? placements_of(in[i]) : Placements(mesh.dims());
      parts[i] =
          move_part(in[i].is_sharded() ? local_of(in[i]) : in[i], in[i].sizes(), mesh, now, decision.in[i], true);
      any_moves = true;
    }
  }
  for (size_t i = 0; any_moves && i < in.size(); ++i) {
    if (is_pending(parts[i])) parts[i] = comm::with_places(decision.mesh->mesh, [&] { return wait_for(parts[i]); });
  }
  return parts;
}

// The same, with a line of explanation where that is asked for.
Tensors explained_parts_for(const OpDef& op, std::span<const Tensor> in, const Decision& decision) {
  if (!explains()) [[likely]]
    return parts_for(op, in, decision);
  const comm::CommCounter sent;
  Tensors parts = parts_for(op, in, decision);
  explain_call(op, in, decision, sent);
  return parts;
}

// The view of a result on its way is on its way, too.
void stay_pending(const Tensor& from, Tensor& to) {
  to.impl()->extension = from.extension()->copy();
  to.impl()->data = nullptr;
}

// A view of a part may need a copy where the same view of the whole needs none: what was redistributed lies otherwise.
void call_on_parts(const OpDef& op, Tensors& parts, const Attrs& attrs, std::span<Tensor> out, op::Rest rest) {
  if (op.view && !parts.empty() && parts[0].defined() && !parts[0].is_contiguous() &&
      std::strcmp(op.name, "view") == 0) {
    try {
      rest.call(op, {parts.data(), parts.size()}, attrs, out);
      return;
    } catch (const InvalidArgument&) {
      parts[0] = contiguous(parts[0]);
    }
  }
  rest.call(op, {parts.data(), parts.size()}, attrs, out);
  if (op.view && !op.cpu && is_pending(parts[0])) [[unlikely]] {
    for (Tensor& y : out) stay_pending(parts[0], y);
  }
}

Strides strides_of(const op::OutSpec& spec) {
  return spec.view_of >= 0 || spec.strided ? spec.strides : contiguous_strides(spec.sizes);
}

// Nothing is computed on a rank outside the mesh.
Tensor nothing_of(const op::OutSpec& spec) {
  return chorale::zeros(spec.sizes.empty() ? Shape{} : Shape{0}, spec.dtype, spec.device);
}

// Ops whose shapes depend on data see all of it.
void call_dynamic(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                  op::Rest rest) {
  Tensors wholes;
  std::shared_ptr<const Layout> layout;
  double cost = 0;
  for (const Tensor& x : in) {
    if (!x.defined() || !x.is_sharded()) {
      wholes.push_back(x);
      continue;
    }
    const Mesh& mesh = mesh_of(x);
    layout = layout_of(mesh, Placements(mesh.dims()));
    CHORALE_CHECK(mesh.is_member(), "[", op.name,
                  "] the shape of its result depends on data, which a rank outside the ", mesh, " does not have");
    wholes.push_back(move_part(local_of(x), x.sizes(), mesh, placements_of(x), layout->placements));
    cost += cost_of_move(x, layout->placements);
  }
  if (cost > 0) warn_of_gathering(op, in, cost);
  rest.call(op, {wholes.data(), wholes.size()}, attrs, out);
  for (Tensor& y : out) {
    const Shape sizes = y.sizes();
    y = wrap(layout, sizes, contiguous_strides(sizes), std::move(y));
  }
}

// A call of a row over lists of n is n calls over lists of one: each tensor is placed as it is. Calls f(inputs, places
// of its results) for each.
template <class F>
void for_each_place(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, F&& f) {
  const op::ListCall call(op, in, attrs);
  const op::Lists& lists = call.lists();
  for (size_t place = 0; place < call.length(); ++place) {
    std::vector<Tensor> own(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(lists.own));
    for (size_t i = 0; i < lists.count; ++i) own.push_back(call.list(i)[place]);
    std::vector<size_t> results;
    size_t at = 0;
    for (size_t i = 0; i < lists.own + lists.count; ++i) {
      if (!lists.written.has(i)) continue;
      results.push_back(i < lists.own ? at : at + place);
      at += i < lists.own ? 1 : call.length();
    }
    for (; at < call.results(); at += call.length()) results.push_back(at + place);
    f(own, results);
  }
}

bool has_lists(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs) {
  return op.lists && op::ListCall(op, in, attrs).length() > 1;
}

}  // namespace

// What is done for sharded tensors is a function of its own, so that the usual call needs no stack frame here and jumps
// straight to the next Builder.
void Sharding::call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                    op::Rest rest) {
  if (!any_sharded(in)) [[likely]]
    return rest.call(op, in, attrs, out);
  call_sharded(op, in, attrs, out, rest);
}

void Sharding::call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                         op::Rest rest) {
  if (!any_sharded(in) && !any_sharded(out)) [[likely]]
    return rest.call_into(op, in, attrs, out);
  call_sharded_into(op, in, attrs, out, rest);
}

void Sharding::call_sharded(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                            op::Rest rest) {
  const NoGrad quiet;  // redistribution is not recorded: autograd stands above
  note_operands(in);
  if (op.dynamic) return call_dynamic(op, in, attrs, out, rest);
  if (has_lists(op, in, attrs)) {
    for_each_place(op, in, attrs, [&](const std::vector<Tensor>& own, const std::vector<size_t>& results) {
      std::vector<Tensor> outs(results.size());
      call(op, own, attrs, outs, rest);
      for (size_t i = 0; i < results.size(); ++i) out[results[i]] = std::move(outs[i]);
    });
    return;
  }
  const std::shared_ptr<const Decision> decision = decision_for(op, in, attrs, out.size(), {});
  if (decision->mesh->mesh.is_member()) {
    Tensors parts = explained_parts_for(op, in, *decision);
    call_on_parts(op, parts, decision->attrs, out, rest);
  } else {
    for (size_t i = 0; i < out.size(); ++i) out[i] = nothing_of(decision->specs[i]);
  }
  for (size_t i = 0; i < out.size(); ++i) {
    const op::OutSpec& spec = decision->specs[i];
    out[i] = wrap(decision->out[i], spec.sizes, strides_of(spec), std::move(out[i]));
  }
}

void Sharding::call_sharded_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                                 std::span<const Tensor> out, op::Rest rest) {
  const NoGrad quiet;
  note_operands(in);
  note_operands(out);
  if (has_lists(op, in, attrs)) {
    for_each_place(op, in, attrs, [&](const std::vector<Tensor>& own, const std::vector<size_t>& results) {
      std::vector<Tensor> outs;
      outs.reserve(results.size());
      for (const size_t i : results) outs.push_back(out[i]);
      call_into(op, own, attrs, outs, rest);
    });
    return;
  }
  CHORALE_CHECK(!op.dynamic, "[", op.name, "] has no in-place or out form: the shape of its result depends on data");
  const std::shared_ptr<const Decision> decision = decision_for(op, in, attrs, out.size(), out);
  if (!decision->mesh->mesh.is_member()) return;
  Tensors parts = explained_parts_for(op, in, *decision), results;
  for (const Tensor& y : out) results.push_back(y.is_sharded() ? local_of(y) : y);
  // An update wants the memory of what it reads to be laid out as that of what it writes.
  if (op.lists) {
    for (Tensor& part : parts) {
      if (part.defined() && part.sizes() == results[0].sizes() && part.strides() != results[0].strides())
        part = contiguous(part);
    }
  }
  rest.call_into(op, {parts.data(), parts.size()}, decision->attrs, {results.data(), results.size()});
  // A number that is written is every rank's: of partial ones it is what they make together.
  for (size_t i = 0; i < out.size(); ++i) {
    const Layout& made = *decision->out[i];
    const bool is_partial = std::any_of(made.placements.begin(), made.placements.end(),
                                        [](const Placement& placement) { return placement.is_partial(); });
    if (!out[i].is_sharded() && is_partial)
      copy_(results[i],
            move_part(results[i], out[i].sizes(), made.mesh, made.placements, Placements(made.mesh.dims())));
  }
}

void forget_decisions() {
  memory_of_decisions().known.clear();
  memory_of_decisions().count = 0;
}

}  // namespace chorale::sharding
