#include "chorale/api/sharded_trace.h"

#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"

namespace chorale::compiled {

std::optional<Whole> whole_of(const Tensor& x) {
  if (!x.defined() || !x.is_sharded()) return {};
  return Whole{sharding::sharded(x).layout, x.sizes(), x.strides()};
}

Whole gradient_like(const Whole& x) {
  Placements placements = x.layout->placements;
  for (Placement& p : placements) {
    if (p.is_partial()) p = {};
  }
  return {sharding::layout_of(x.layout->mesh, placements), x.sizes, contiguous_strides(x.sizes)};
}

Tensor part_of_gradient(const Tensor& gradient, const Whole& wanted) {
  const NoGrad quiet;
  const Mesh& mesh = wanted.layout->mesh;
  // What an operation outside made as a whole is the same on every rank.
  const Tensor sharded = gradient.is_sharded() ? gradient : from_local(gradient, mesh, Placements(mesh.dims()));
  return to_local(redistribute(sharded, wanted.layout->placements));
}

bool same_layout(const LayoutPtr& a, const LayoutPtr& b) {
  // A thread has one object of a kind; other threads have their own.
  return a == b || (a && b && a->mesh == b->mesh && a->placements == b->placements);
}

bool same_layouts(const std::vector<LayoutPtr>& a, const std::vector<LayoutPtr>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_layout);
}

void ShardedSeen::note_layout(const LayoutPtr& layout) {
  if (std::find(layouts_.begin(), layouts_.end(), layout) == layouts_.end()) layouts_.push_back(layout);
}

void ShardedSeen::note_used(const Tensor& x) {
  note_layout(sharding::sharded(x).layout);
  if (!recording_.is_strict() || part_of(x).is_traced() || !is_leaf(x)) return;
  const auto is_known = [&](const Tensor& known) { return known.is(x); };
  if (std::none_of(leaves_.begin(), leaves_.end(), is_known)) leaves_.push_back(x);
}

void ShardedSeen::note_made(const Tensor& x) {
  const sharding::Sharded& made = sharding::sharded(x);
  note_layout(made.layout);
  if (!made.local.is_traced()) return;
  made_.push_back(std::make_shared<Tensor::Impl*>(x.impl()));
  static_cast<sharding::Sharded&>(*x.impl()->extension).alive = made_.back();
}

void ShardedSeen::note_constant(const Tensor& x) { recording_.mark_constant(x); }

std::vector<Tensor> ShardedSeen::alive() const {
  std::vector<Tensor> found;
  for (const std::shared_ptr<Tensor::Impl*>& one : made_) {
    if (!*one) continue;
    Tensor x = Tensor::share(*one);
    // What was recorded before has run, and is something from outside now.
    if (x.is_sharded() && part_of(x).is_traced() && recording_.find(part_of(x)) != graph::kNone) found.push_back(x);
  }
  return found;
}

void ShardedSeen::clear() {
  made_.clear();
  leaves_.clear();
  layouts_.clear();
}

}  // namespace chorale::compiled
