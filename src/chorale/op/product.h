// Products of matrices. Transposed operands are never copied.
#pragma once

#include <string_view>
#include <vector>

#include "chorale/op/op_def.h"

namespace chorale {

// PyTorch's rules: the last two dimensions are matrices, the others broadcast; a vector on the left is a row, on the
// right a column, and that dimension disappears from the result. Dtypes must be equal.
Tensor matmul(const Tensor& a, const Tensor& b);
Tensor mm(const Tensor& a, const Tensor& b);   // two matrices
Tensor bmm(const Tensor& a, const Tensor& b);  // two batches of matrices
// beta c + alpha a b, with c broadcast to the product's shape. c is not read when beta is 0.
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, Scalar beta = 1, Scalar alpha = 1);
// x weight^T + bias for x [.., in], weight [out, in], bias [out].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
Tensor dot(const Tensor& a, const Tensor& b);    // two vectors; complex ones are not conjugated
Tensor outer(const Tensor& a, const Tensor& b);  // two vectors give a matrix
// "ij,jk->ik": letters name dimensions; those not in the result are summed. A repeated letter within an operand takes
// the diagonal, "..." stands for dimensions that broadcast, and without "->" the result has the letters that occur
// once, in alphabetical order. Several operands are combined from left to right.
Tensor einsum(std::string_view equation, const std::vector<Tensor>& operands);

namespace op {
extern const OpDef kMatmul, kAddmm, kLinear;
}

}  // namespace chorale
