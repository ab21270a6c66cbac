// Tensors out of nothing.
#pragma once

#include <optional>

#include "chorale/op/op_def.h"

namespace chorale {

// Tensors of a shape; the elements of empty() are uninitialised.
Tensor empty(const Shape& sizes, DType dtype = DType::kF32, Device device = kCpu);
Tensor full(const Shape& sizes, Scalar value, DType dtype = DType::kF32, Device device = kCpu);
Tensor zeros(const Shape& sizes, DType dtype = DType::kF32, Device device = kCpu);
Tensor ones(const Shape& sizes, DType dtype = DType::kF32, Device device = kCpu);
// The shape, dtype and device of x.
Tensor empty_like(const Tensor& x);
Tensor full_like(const Tensor& x, Scalar value);
Tensor zeros_like(const Tensor& x);
Tensor ones_like(const Tensor& x);
// Overwrite x; return it.
const Tensor& fill_(const Tensor& x, Scalar value);
const Tensor& zero_(const Tensor& x);

// start, start + step, … up to `end`, which is not reached. Integers give i64, other numbers f32.
Tensor arange(Scalar start, Scalar end, Scalar step = 1, std::optional<DType> dtype = {}, Device device = kCpu);
Tensor arange(Scalar end, std::optional<DType> dtype = {}, Device device = kCpu);
// `count` values from start to end, both reached.
Tensor linspace(double start, double end, int64_t count, DType dtype = DType::kF32, Device device = kCpu);
Tensor eye(int64_t rows, int64_t cols = -1, DType dtype = DType::kF32, Device device = kCpu);

}  // namespace chorale
