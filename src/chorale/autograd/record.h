// A Builder that records calls for backward and hands them on. It sees only op::Builder.
#pragma once

#include "chorale/autograd/node.h"
#include "chorale/op/builder.h"

namespace chorale::autograd {

class Autograd final : public op::Builder {
 public:
  // `usual`: what is below it as a rule. A node that is recorded over anything else remembers it, for its gradient.
  explicit Autograd(const op::Stack& usual) : Builder(op::Place::kAutograd), usual_(usual) {}

  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override;

 private:
  void remember(Node& node, op::Rest rest);

  const op::Stack& usual_;
};

// Gives `tensor`, which was just overwritten by what `node` recorded, its new history; a write into a view changes its
// base's history too.
void rebase(const Tensor& tensor, const base::Intrusive<Node>& node, uint32_t index);
// Throws StateError when a recorded in-place write into `tensor` is not allowed (a leaf that requires a gradient).
void check_in_place(const char* op, const Tensor& tensor);

}  // namespace chorale::autograd
