// What is checked of every call, whatever runs it: eager execution, tracing and sharding share it. Rows check what is
// special to them (OpDef::infer).
#pragma once

#include <span>

#include "chorale/op/op_def.h"

namespace chorale::op {

using OutSpecs = SmallVector<OutSpec, 2>;

// Inputs are there unless the row says that they may be absent, dense, on one device, and the first has a dtype of the
// row's. Throws InvalidArgument that names the input.
void check_inputs(const OpDef& op, std::span<const Tensor> in);

// Checks a call and says what its results look like, in default-constructed specs. Not for rows whose shapes depend on
// data.
inline void prepare(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<OutSpec> results) {
  check_inputs(op, in);
  op.infer({op, in, attrs}, results);
}
inline OutSpecs prepare(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, size_t outputs) {
  OutSpecs specs(outputs);
  prepare(op, in, attrs, {specs.data(), specs.size()});
  return specs;
}
// Checks a call that writes into tensors which exist: everything is checked before the first byte is written. Those
// must be writable, not expanded, and of the shape, device and (but for a conversion within its category) dtype of the
// result.
OutSpecs prepare_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out);
// Counts the writes of such a call, once they are done.
void note_writes(const OpDef& op, std::span<const Tensor> out);

}  // namespace chorale::op
