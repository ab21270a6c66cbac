// The numbers among the attributes of a pointwise call, for kernels of every device.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// Calls plain(double) and number(Scalar) for the parameters p0, p1, … of an expression, in the order of their list.
template <class Plain, class Number>
void for_each_number(const Attrs& attrs, const Plain& plain, const Number& number) {
  if (!attrs.type()) return;
  for (const Field& field : attrs.type()->fields) {
    const auto* bytes = static_cast<const std::byte*>(attrs.bytes()) + field.offset;
    if (field.kind == FieldKind::kF64) {
      plain(*reinterpret_cast<const double*>(bytes));
    } else if (field.kind == FieldKind::kScalar) {
      number(*reinterpret_cast<const Scalar*>(bytes));
    }
  }
}

}  // namespace chorale::kernel
