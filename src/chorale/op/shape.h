// Ops that arrange elements anew: joining, repeating, padding, rolling, cutting triangles.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "chorale/kernel/shape_attrs.h"
#include "chorale/op/op_def.h"

namespace chorale {

using kernel::PadMode;

// Tensors one behind the other along `dim`; the other sizes agree. Dtypes promote. An empty vector (shape [0]) fits
// anything.
Tensor cat(std::span<const Tensor> xs, int64_t dim = 0);
Tensor cat(std::initializer_list<Tensor> xs, int64_t dim = 0);
// Tensors of one shape along a new dimension. Dtypes promote.
Tensor stack(std::span<const Tensor> xs, int64_t dim = 0);
Tensor stack(std::initializer_list<Tensor> xs, int64_t dim = 0);

// x repeated sizes[i] times along dimension i; `repeat` needs an entry per dimension (more add dimensions in front),
// `tile` takes missing ones in front as 1.
Tensor repeat(const Tensor& x, const IntList& repeats);
Tensor tile(const Tensor& x, const IntList& repeats);
// Each element repeated in place, along `dim` or in the flattened tensor.
Tensor repeat_interleave(const Tensor& x, int64_t repeats, std::optional<int64_t> dim = {});
// The same with a count per element; the size of the result depends on data.
Tensor repeat_interleave(const Tensor& x, const Tensor& repeats, std::optional<int64_t> dim = {});

// `pads` has two entries (before, after) per dimension, from the last one backwards. A negative entry crops (kConstant
// only). kReflect does not repeat the edge and must be smaller than the dimension.
Tensor pad(const Tensor& x, const IntList& pads, PadMode mode = PadMode::kConstant, Scalar value = 0);

// Elements that leave at one end come back at the other. Without dims, of the flattened tensor.
Tensor roll(const Tensor& x, const IntList& shifts, const IntList& dims = {});
// The triangle of each matrix at and below (above) a diagonal, zeros elsewhere.
Tensor tril(const Tensor& x, int64_t diagonal = 0);
Tensor triu(const Tensor& x, int64_t diagonal = 0);

// Vectors (or scalars) as coordinates of a grid: result i varies along dimension i (kIJ), or with the first two
// exchanged (kXY). Views of the inputs.
enum class Indexing : uint8_t { kIJ, kXY };
std::vector<Tensor> meshgrid(std::span<const Tensor> xs, Indexing indexing = Indexing::kIJ);
std::vector<Tensor> meshgrid(std::initializer_list<Tensor> xs, Indexing indexing = Indexing::kIJ);

// i64 zeros with a one at each class, as a new last dimension. With classes = -1 there are as many as the largest asks
// for, and the size of the result depends on data.
Tensor one_hot(const Tensor& index, int64_t classes = -1);

namespace op {
using kernel::OneHotAttrs;
using kernel::PadAttrs;
using kernel::RollAttrs;
using kernel::TriangleAttrs;

extern const OpDef kCat, kStack, kPad, kPadBackward, kRoll, kTril, kTriu, kOneHot, kRepeatInterleave;
}  // namespace op

}  // namespace chorale
