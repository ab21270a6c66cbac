#include "chorale/kernel/pointwise.h"

namespace chorale::kernel {
namespace {

// A dtype, or none yet.
struct Found {
  DType dtype = DType::kBool;
  bool any = false;

  void add(DType other) {
    dtype = any ? promote(dtype, other) : other;
    any = true;
  }
};

// `higher` decides; `lower` counts only when its category is higher.
Found combine(Found higher, Found lower) {
  if (!lower.any) return higher;
  if (!higher.any) return lower;
  if (is_complex(higher.dtype)) return higher;
  if (is_floating(higher.dtype)) {
    if (is_complex(lower.dtype)) higher.dtype = complex_of(higher.dtype);
    return higher;
  }
  if (higher.dtype == DType::kBool || is_differentiable(lower.dtype)) higher.add(lower.dtype);
  return higher;
}

DType dtype_of_number(Scalar::Kind kind) {
  constexpr DType dtypes[] = {DType::kBool, DType::kI64, DType::kF32, DType::kC64};
  return dtypes[static_cast<size_t>(kind)];
}

Found numbers_among(const Attrs& attrs) {
  Found numbers;
  if (!attrs.type()) return numbers;
  for (const Field& field : attrs.type()->fields) {
    if (field.kind != FieldKind::kScalar) continue;
    const auto* bytes = static_cast<const std::byte*>(attrs.bytes()) + field.offset;
    numbers.add(dtype_of_number(reinterpret_cast<const Scalar*>(bytes)->kind()));
  }
  return numbers;
}

}  // namespace

DType common_dtype(const Pointwise& pointwise, std::span<const Tensor> in, const Attrs& attrs) {
  if (vec::info(pointwise.op).kind == vec::ScalarKind::kMasked) in = in.subspan(1);
  Found with_dims, without_dims, numbers;
  for (const Tensor& x : in) (x.dims() > 0 ? with_dims : without_dims).add(x.dtype());
  if (pointwise.promotion != Promotion::kScaled) numbers = numbers_among(attrs);
  const DType common = combine(with_dims, combine(without_dims, numbers)).dtype;
  return pointwise.promotion == Promotion::kFloat && !is_differentiable(common) ? DType::kF32 : common;
}

bool loop_dtype(vec::ScalarOp op, DType common, DType& loop) {
  const uint8_t domain = vec::info(op).dtypes;
  const bool moves_bytes = op == vec::ScalarOp::kWhere || op == vec::ScalarOp::kMaskedFill;
  loop = moves_bytes ? common : compute_of(common);
  if (common == DType::kBool && !(domain & vec::domain::B)) loop = DType::kU8;
  return moves_bytes || (domain & vec::domain::of(loop)) != 0;
}

}  // namespace chorale::kernel
