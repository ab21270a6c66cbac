// A Builder that writes calls down instead of running them, into the thread's current Recording; where there is none it
// runs them. It stands at the bottom of a stack, in the place of the one that runs ops.
#pragma once

#include "chorale/op/builder.h"

namespace chorale::graph {

class Tracer final : public op::Builder {
 public:
  // `runs`: what runs an op where nothing is recorded.
  explicit Tracer(op::Builder& runs) : Builder(op::Place::kBottom), runs_{&runs} {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override;
  Tensor draw(Generator& generator, int64_t words, Device device, op::Rest rest) override;
  void set_data(const Tensor& x, const Tensor& other, op::Rest rest) override;
  // While something is recorded, memory is not reused: a graph must not depend on who holds a tensor meanwhile.
  bool may_reuse_memory() const override;

 private:
  op::Stack runs_;
};

// The one Tracer over what a thread starts with.
Tracer& tracer();

}  // namespace chorale::graph
