// A Builder that records calls for backward and hands them on. It sees only op::Builder.
#pragma once

#include "chorale/autograd/node.h"
#include "chorale/op/builder.h"

namespace chorale::autograd {

class Autograd final : public op::Builder {
 public:
  explicit Autograd(op::Builder& next) : next_(next) {}

  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                 std::span<const Tensor> out) override;

 private:
  op::Builder& next_;
};

// Gives `tensor`, which was just overwritten by what `node` recorded, its new history; a write into a view changes its
// base's history too.
void rebase(const Tensor& tensor, const Intrusive<Node>& node, uint32_t index);
// Throws StateError when a recorded in-place write into `tensor` is not allowed (a leaf that requires a gradient).
void check_in_place(const char* op, const Tensor& tensor);

}  // namespace chorale::autograd
