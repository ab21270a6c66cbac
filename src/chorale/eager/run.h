// A Builder that runs an op now: infer, allocate, launch. Knows nothing of gradients.
#pragma once

#include "chorale/op/builder.h"

namespace chorale::eager {

class Eager final : public op::Builder {
 public:
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                 std::span<const Tensor> out) override;
};

}  // namespace chorale::eager
