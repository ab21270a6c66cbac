#include "chorale/autograd/record.h"

#include <algorithm>

#include "chorale/autograd/mode.h"
#include "chorale/base/error.h"
#include "chorale/base/pool.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"

namespace chorale::autograd {
namespace {

using op::OpDef;

bool any_may_want_grad(std::span<const Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return may_want_grad(t); });
}

// Edges and saved inputs; outputs are filled in once they exist. Null when no input leads to a leaf.
Intrusive<Node> start_node(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs) {
  auto node = Node::make();
  node->op = &op;
  uint64_t floor = 0;
  bool wanted = false;
  for (const Tensor& x : in) {
    Edge edge = x.defined() && is_differentiable(x.dtype()) ? edge_of(x) : Edge{};
    if (edge.node) floor = std::max(floor, edge.node->number);
    wanted |= edge.wanted();
    node->edges.push_back(std::move(edge));
  }
  if (!wanted) return {};
  node->attrs = attrs;
  node->number = next_number(floor);
  if (op.saves.metas) {
    node->inputs = std::make_unique<std::vector<op::Meta>>();
    for (const Tensor& x : in)
      node->inputs->push_back(x.defined() ? op::Meta{x.sizes(), x.dtype(), x.device()} : op::Meta{});
  }
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i].defined() && op.saves.in >> std::min<size_t>(i, 31) & 1u) {
      node->saved_in.resize(in.size());
      node->saved_in[i] = Saved(in[i], false);
    }
  }
  return node;
}

void finish_node(Node& node, std::span<const Tensor> out) {
  for (const Tensor& y : out) node.outputs.push_back({y.sizes(), y.dtype(), y.device()});
  for (size_t i = 0; i < out.size(); ++i) {
    if (node.op->saves.out >> i & 1u) {
      node.saved_out.resize(out.size());
      node.saved_out[i] = Saved(out[i], true);
    }
  }
}

// An in-place write through a view, seen from the base: the view's region comes from the writing op, the rest from
// before. It keeps the calls that made the view, not the view: that holds its base, which holds this (Note [No
// cycles]).
struct WriteThroughView final : CustomBackward {
  explicit WriteThroughView(const Tensor& written) {
    for (const Slot* slot = slot_of(written); slot && slot->view; slot = slot_of(slot->view->view_of)) {
      calls.push_back({slot->view->op, slot->view->attrs});
    }
    std::reverse(calls.begin(), calls.end());
  }
  // The region of the view, of another tensor of the base's shape.
  Tensor region_of(Tensor base) const {
    for (const Call& call : calls) base = op::call(*call.op, call.attrs, base);
    return base;
  }
  const char* name() const override { return "write_through_view"; }
  // Edges: the base before, the op that wrote.
  Tensors apply(Node&, std::span<const Tensor> dout, uint32_t needed) override {
    const Tensor region = region_of(dout[0]);
    Tensors din(2);
    if (needed & 2u) din[1] = clone(region);
    if (needed & 1u) {
      // Out of place, so that it can be differentiated again: a mask that is zero in the region.
      Tensor mask;
      {
        const NoGrad quiet;
        mask = ones_like(dout[0]);
        fill_(region_of(mask), 0);
      }
      din[0] = mul(dout[0], mask);
    }
    return din;
  }

  struct Call {
    const op::OpDef* op;
    Attrs attrs;
  };
  std::vector<Call> calls;  // from the base on
};

void attach(const Tensor& tensor, const Intrusive<Node>& node, uint32_t index) {
  Slot& slot = slot_for_writing(tensor);
  slot.node = node;
  slot.index = index;
}

}  // namespace

void check_in_place(const char* op, const Tensor& tensor) {
  const Tensor& base = base_of(tensor);
  const Slot* slot = slot_of(base);
  CHORALE_CHECK_STATE(!slot || !slot->requires_grad || slot->node, "[", op, "] would overwrite in place ",
                      base.is(tensor) ? "a leaf" : "a view of a leaf", " that requires a gradient (", base.dtype(), " ",
                      base.sizes(), "); do it inside a NoGrad scope, or on a clone");
}

void rebase(const Tensor& tensor, const Intrusive<Node>& node, uint32_t index) {
  Slot& slot = slot_for_writing(tensor);
  if (!slot.view) {
    ++slot.rebased;
    attach(tensor, node, index);
    return;
  }
  const Tensor base = slot.view->base;
  auto write = Node::make();
  write->edges.push_back(edge_of(base));
  write->edges.push_back({node, index, {}});
  write->number = next_number(node->number);
  write->outputs.push_back({base.sizes(), base.dtype(), base.device()});
  write->custom = std::make_unique<WriteThroughView>(tensor);
  Slot& base_slot = slot_for_writing(base);
  ++base_slot.rebased;  // every view, this one included, makes its node anew when it is next used
  attach(base, write, 0);
}

void Autograd::remember(Node& node, op::Rest rest) {
  if (rest == usual_.all()) [[likely]]
    return;
  node.stack = std::make_shared<const op::KeptStack>(op::Stack(rest).with(*this));
}

void Autograd::call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                    op::Rest rest) {
  if (!mode.grad) [[unlikely]] {
    rest.call(op, in, attrs, out);
    if (mode.inference) {
      for (const Tensor& y : out) y.impl()->inference = true;
    }
    return;
  }
  Intrusive<Node> node;
  if (any_may_want_grad(in) && op.grad != op::not_differentiable) node = start_node(op, in, attrs);
  rest.call(op, in, attrs, out);
  if (node) {
    remember(*node, rest);
    finish_node(*node, out);
    for (size_t i = 0; i < out.size(); ++i) {
      if (is_differentiable(out[i].dtype())) attach(out[i], node, static_cast<uint32_t>(i));
    }
  }
  if (op.view && op.grad != op::not_differentiable) {  // detach() has no part in the history of its input
    for (const Tensor& y : out) {
      Slot& slot = slot_for_writing(y);
      const Tensor& base = base_of(in[0]);
      const Slot* base_slot = slot_of(base);
      slot.view = base::Pool<ViewInfo>::make(ViewInfo{in[0], base, &op, attrs, base_slot ? base_slot->rebased : 0});
    }
  }
}

void Autograd::call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                         op::Rest rest) {
  if (!mode.grad || (!any_may_want_grad(in) && !any_may_want_grad(out))) {
    rest.call_into(op, in, attrs, out);
    return;
  }
  for (const Tensor& y : out) check_in_place(op.name, y);
  Intrusive<Node> node;
  if (op.grad != op::not_differentiable) node = start_node(op, in, attrs);
  rest.call_into(op, in, attrs, out);
  if (!node) {
    // Nothing of the new value depends on a leaf: what was recorded for the old one must not be used for it.
    for (const Tensor& y : out) {
      if (!edge_of(y).wanted() && !edge_of(base_of(y)).wanted()) continue;
      auto constant = Node::make();
      constant->op = &op;
      constant->number = next_number(0);
      for (const Tensor& written : out)
        constant->outputs.push_back({written.sizes(), written.dtype(), written.device()});
      rebase(y, constant, 0);
    }
    return;
  }
  remember(*node, rest);
  finish_node(*node, out);
  for (size_t i = 0; i < out.size(); ++i) {
    if (is_differentiable(out[i].dtype())) rebase(out[i], node, static_cast<uint32_t>(i));
  }
}

}  // namespace chorale::autograd
