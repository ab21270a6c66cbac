#include "chorale/autograd/record.h"

#include <algorithm>
#include <optional>

#include "chorale/autograd/mode.h"
#include "chorale/autograd/new_node.h"
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

// Edges and saved inputs; outputs are added once they exist. Nothing when no input leads to a leaf. `save` gives what
// is to be saved of an input: itself, a copy, or nothing.
template <class Save>
std::optional<NewNode> start_node(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, Save&& save) {
  NewNode node;
  for (const Tensor& x : in) node.add_input(x);
  if (!node.is_wanted()) return {};
  node.set_rule(op, attrs);
  if (op.saves.specs) {
    node->inputs = std::make_unique<std::vector<TensorSpec>>();
    for (const Tensor& x : in) node->inputs->push_back(x.defined() ? op::spec_of(x) : TensorSpec{});
  }
  for (size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined() || !op.saves.in.has(i)) continue;
    const Tensor& value = save(node, i);
    if (!value.defined()) continue;
    node->saved_in.resize(in.size());
    node->saved_in[i] = Saved(value, false);
  }
  return node;
}

// Whether the result is linear in input i, so that the gradient by that input does not read it.
bool is_linear_in(const OpDef& op, size_t i) {
  return std::any_of(std::begin(op.linear.terms), std::end(op.linear.terms),
                     [&](uint8_t term) { return i < 8 && (term >> i & 1u) != 0; });
}

// What an op in place saves: a copy of those inputs that it overwrites and whose old values a gradient will read.
class Overwritten {
 public:
  Overwritten(const OpDef& op, std::span<const Tensor> in, std::span<const Tensor> out, op::Rest rest)
      : op_(op), in_(in), out_(out), rest_(rest) {}

  const Tensor& operator()(const NewNode& node, size_t i) {
    const Tensor& x = in_[i];
    const auto shares_memory = [&](const Tensor& y) {
      return y.defined() && (y.is(x) || (y.storage() && y.storage() == x.storage()));
    };
    if (std::none_of(out_.begin(), out_.end(), shares_memory)) return x;
    const auto& edges = node.node()->edges;
    const auto others =
        static_cast<size_t>(std::count_if(edges.begin(), edges.end(), [](const Edge& e) { return e.wanted(); }));
    if (is_linear_in(op_, i) && others == 1 && edges[i].wanted()) return nothing_;
    if (!copied_of_.defined() || !copied_of_.is(x)) {
      copied_of_ = x;
      copy_ = {};
      rest_.call(op::kTo, {&x, 1}, op::CopyAttrs{x.dtype(), /*keep_layout=*/true}, {&copy_, 1});
    }
    return copy_;
  }

 private:
  const OpDef& op_;
  std::span<const Tensor> in_, out_;
  op::Rest rest_;
  Tensor copied_of_, copy_, nothing_;
};

void save_outputs(const NewNode& node, std::span<const Tensor> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (node->op->saves.out.has(i)) {
      node->saved_out.resize(out.size());
      node->saved_out[i] = Saved(out[i], true);
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
  Tensors apply(Node&, std::span<const Tensor> dout, op::InputSet needed) override {
    const Tensor region = region_of(dout[0]);
    Tensors din(2);
    if (needed.has(1)) din[1] = clone(region);
    if (needed.has(0)) {
      // It is made out of place, by a mask that is zero in the region, so that it can be differentiated again.
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

}  // namespace

void mark_shared(const Tensor& result, const Tensor& input) {
  const Tensor& base = base_of(input);
  const Slot* base_slot = slot_of(base);
  slot_for_writing(result).view =
      base::Pool<ViewInfo>::make(ViewInfo{input, base, nullptr, {}, base_slot ? base_slot->rebased : 0});
}

void check_in_place(const char* op, const Tensor& tensor) {
  for (const Tensor* at = &tensor; slot_of(*at) && slot_of(*at)->view; at = &slot_of(*at)->view->view_of) {
    const Slot& slot = *slot_of(*at);
    CHORALE_CHECK_STATE(slot.view->op, "[", op, "] would overwrite in place ", at == &tensor ? "" : "a view of ",
                        "what ", slot.node ? slot.node->name() : "a function", "() gave (", at->dtype(), " ",
                        at->sizes(), "), whose memory is that of its input: the input would change without a history; ",
                        "write into a clone, into the input itself, or inside a NoGrad scope");
  }
  const Tensor& base = base_of(tensor);
  const Slot* slot = slot_of(base);
  CHORALE_CHECK_STATE(!slot || !slot->requires_grad || slot->node, "[", op, "] would overwrite in place ",
                      base.is(tensor) ? "a leaf" : "a view of a leaf", " that requires a gradient (", base.dtype(), " ",
                      base.sizes(), "); do it inside a NoGrad scope, or on a clone");
}

void rebase(const Tensor& tensor, const base::Intrusive<Node>& node, uint32_t index) {
  Slot& slot = slot_for_writing(tensor);
  if (!slot.view) {
    ++slot.rebased;
    set_history(tensor, node, index);
    return;
  }
  const Tensor base = slot.view->base;
  NewNode write;
  write.add_edge(edge_of(base));
  write.add_edge({node, index, {}});
  write.set_rule(std::make_unique<WriteThroughView>(tensor));
  ++slot_for_writing(base).rebased;  // every view, this one included, makes its node anew when it is next used
  write.add_output(base);
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
  std::optional<NewNode> node;
  if (any_may_want_grad(in) && op.grad != op::not_differentiable)
    node = start_node(op, in, attrs, [&](const NewNode&, size_t i) -> const Tensor& { return in[i]; });
  rest.call(op, in, attrs, out);
  if (node) {
    remember(*node->node(), rest);
    save_outputs(*node, out);
    for (const Tensor& y : out) node->add_output(y);
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
  std::optional<NewNode> node;
  if (op.grad != op::not_differentiable) node = start_node(op, in, attrs, Overwritten(op, in, out, rest));
  rest.call_into(op, in, attrs, out);
  if (!node) {
    // Nothing of the new value depends on a leaf: what was recorded for the old one must not be used for it.
    for (const Tensor& y : out) {
      if (!edge_of(y).wanted() && !edge_of(base_of(y)).wanted()) continue;
      NewNode constant;
      constant.set_rule(op, attrs);
      for (const Tensor& written : out) constant.describe_output(op::spec_of(written));
      rebase(y, constant.node(), 0);
    }
    return;
  }
  remember(*node->node(), rest);
  save_outputs(*node, out);
  for (const Tensor& y : out) node->describe_output(op::spec_of(y));
  for (size_t i = 0; i < out.size(); ++i) {
    if (is_differentiable(out[i].dtype())) rebase(out[i], node->node(), static_cast<uint32_t>(i));
  }
}

}  // namespace chorale::autograd
