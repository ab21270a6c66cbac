// A Builder that runs an op now: infer, allocate, launch. Knows nothing of gradients.
#pragma once

#include "chorale/op/builder.h"

namespace chorale::eager {

class Eager final : public op::Builder {
 public:
  Eager();
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override;
  Tensor draw(Generator& generator, int64_t words, Device device, op::Rest rest) override;
  void set_data(const Tensor& x, const Tensor& other, op::Rest rest) override;
};

}  // namespace chorale::eager
