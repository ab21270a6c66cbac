// What kernels over lists of tensors share.
#pragma once

#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// The number in a tensor without dimensions, of a floating dtype.
double number_in(const Tensor& x);

// Gives results that are not their inputs the values of those, so that a kernel can go on in place.
void start_from(std::span<const Tensor> in, std::span<const Tensor> out);

bool is_laid_out_as(const Tensor& x, const Tensor& like);
// A tensor with the values of x, laid out as `like`: x itself where that is so already. `like` has no holes.
Tensor laid_out_as(const Tensor& x, const Tensor& like);
Tensor laid_out_as(const Tensor& x, const Tensor& like, DType dtype);

// Pieces of several tensors, for passes that are cut into pieces of one size whatever the threads, so that sums over
// them do not depend on threads either.
struct Piece {
  size_t tensor;  // in its list
  int64_t begin, n;
};
std::vector<Piece> pieces_of(std::span<const Tensor> tensors);
// Calls body(piece, i) for each, on several threads.
void for_each_piece(std::span<const Piece> pieces, base::FunctionRef<void(const Piece& piece, size_t i)> body);

}  // namespace chorale::kernel::cpu
