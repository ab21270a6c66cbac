// The numbers among the attributes of a pointwise call, for kernels of every device.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// Fills the parameters p0, p1, … of an expression for a loop over `loop`, in the order of their list: `f` as floating
// numbers, of which complex ones take two places, and `i` by integer(Scalar).
template <class Params, class Integer>
Params params_of(const Attrs& attrs, DType loop, const Integer& integer) {
  Params params;
  if (!attrs.type()) return params;
  size_t at = 0;
  for (const Field& field : attrs.type()->fields) {
    const auto* bytes = static_cast<const std::byte*>(attrs.bytes()) + field.offset;
    if (field.kind == FieldKind::kF64) {
      params.f[at++] = *reinterpret_cast<const double*>(bytes);
    } else if (field.kind == FieldKind::kScalar) {
      const auto& number = *reinterpret_cast<const Scalar*>(bytes);
      params.f[at] = number.real();
      if (is_complex(loop)) {
        params.f[++at] = number.imag();
      } else {
        params.i[at] = loop == DType::kBool ? !number.is_zero() : integer(number);
      }
      ++at;
    }
  }
  return params;
}

}  // namespace chorale::kernel
