#include "chorale/autocast/autocast.h"

#include "chorale/autograd/mode.h"
#include "chorale/autograd/node.h"
#include "chorale/base/error.h"
#include "chorale/op/copy.h"

namespace chorale {
namespace autocast {
namespace {

bool is_real_floating(const Tensor& x) { return x.defined() && is_floating(x.dtype()) && !x.is_sparse(); }

// The dtype that a row wants its floating inputs in; nothing where they stay as they are.
std::optional<DType> wanted(const op::OpDef& op, std::span<const Tensor> in, DType lower) {
  if (op.autocast == op::Cast::kNone) return {};
  std::optional<DType> widest;
  for (const Tensor& x : in) {
    if (is_real_floating(x)) widest = widest ? promote(*widest, x.dtype()) : x.dtype();
  }
  // A program that computes in f64 means it.
  if (!widest || (*widest == DType::kF64 && op.autocast != op::Cast::kWidest)) return {};
  return op.autocast == op::Cast::kLower ? lower : op.autocast == op::Cast::kF32 ? DType::kF32 : *widest;
}

bool is_parameter(const Tensor& x) {
  const autograd::Slot* slot = autograd::slot_of(x);
  return slot && slot->requires_grad && !slot->node;
}

// Backward lets go of a graph when it has run; the next forward needs a new cast.
bool is_spent(const Tensor& recorded) {
  const autograd::Slot* slot = autograd::slot_of(recorded);
  return slot && slot->node && slot->node->released;
}

Tensor cast_by(op::Rest rest, const Tensor& x, DType dtype) {
  Tensor result;
  rest.call(op::kTo, {&x, 1}, op::CopyAttrs{dtype, /*keep_layout=*/true}, {&result, 1});
  return result;
}

}  // namespace

Tensor Caster::cast(const Tensor& x, DType dtype, op::Rest rest) {
  if (dtype != lower_ || !is_parameter(x)) return cast_by(rest, x, dtype);
  const uint32_t version = x.storage()->version();
  CastParameter& known = parameters_[x.impl()];
  const bool usable =
      known.cast.defined() && known.version == version && (known.recorded || !grad_enabled()) && !is_spent(known.cast);
  if (!usable) known = {x, cast_by(rest, x, dtype), version, grad_enabled()};
  return known.cast;
}

void Caster::call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                  op::Rest rest) {
  const auto dtype = wanted(op, in, lower_);
  if (!dtype) {
    rest.call(op, in, attrs, out);
    return;
  }
  Tensors inputs;
  for (const Tensor& x : in) inputs.push_back(is_real_floating(x) && x.dtype() != *dtype ? cast(x, *dtype, rest) : x);
  rest.call(op, {inputs.data(), inputs.size()}, attrs, out);
}

}  // namespace autocast

Autocast::Autocast(DType lower, bool enabled)
    : caster_(lower),
      under_(enabled ? op::current_stack().with(caster_) : op::current_stack().without(op::Place::kAutocast)) {
  CHORALE_CHECK(is_half(lower), "[Autocast] lowers to f16 or bf16, not ", lower);
}

bool autocast_enabled() { return op::current_stack().at(op::Place::kAutocast) != nullptr; }

std::optional<DType> autocast_dtype() {
  const auto* caster = dynamic_cast<const autocast::Caster*>(op::current_stack().at(op::Place::kAutocast));
  return caster ? std::optional(caster->lower()) : std::nullopt;
}

}  // namespace chorale
