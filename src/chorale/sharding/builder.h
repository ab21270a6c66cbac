// A Builder that runs ops on sharded tensors: it decides how (decision.h), redistributes operands, calls the op on this
// rank's parts, and wraps the results. Calls without a sharded tensor pass through. Autograd stands above it and sees
// whole tensors, so that what is redistributed here is not recorded.
#pragma once

#include "chorale/op/builder.h"

namespace chorale::sharding {

class Sharding final : public op::Builder {
 public:
  Sharding() : Builder(op::Place::kSharding) {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override;

 private:
  void call_sharded(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                    op::Rest rest);
  void call_sharded_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                         std::span<const Tensor> out, op::Rest rest);
};

// How ops were split so far is remembered by each thread, with the meshes of their operands: this thread forgets it, so
// that the groups of meshes that are not used any more end.
void forget_decisions();

}  // namespace chorale::sharding
