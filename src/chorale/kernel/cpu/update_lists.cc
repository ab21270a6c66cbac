#include "chorale/kernel/cpu/update_lists.h"

#include <algorithm>

#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {

double number_in(const Tensor& x) { return x.dtype() == DType::kF64 ? *x.data<double>() : x.item<double>(); }

void start_from(std::span<const Tensor> in, std::span<const Tensor> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (in[i].raw() != out[i].raw()) copy_into(in[i], out[i]);
  }
}

bool is_laid_out_as(const Tensor& x, const Tensor& like) {
  return x.strides() == like.strides() || (x.is_contiguous() && like.is_contiguous());
}

Tensor laid_out_as(const Tensor& x, const Tensor& like) { return laid_out_as(x, like, x.dtype()); }

Tensor laid_out_as(const Tensor& x, const Tensor& like, DType dtype) {
  if (is_laid_out_as(x, like) && x.dtype() == dtype) return x;
  Tensor other = Tensor::empty_strided(like.sizes(), like.strides(), dtype);
  copy_into(x, other);
  return other;
}

std::vector<Piece> pieces_of(std::span<const Tensor> tensors) {
  constexpr int64_t kElems = 16384;
  std::vector<Piece> pieces;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t at = 0; at < tensors[t].elems(); at += kElems)
      pieces.push_back({t, at, std::min(kElems, tensors[t].elems() - at)});
  }
  return pieces;
}

void for_each_piece(std::span<const Piece> pieces, base::FunctionRef<void(const Piece& piece, size_t i)> body) {
  parallel_for(static_cast<int64_t>(pieces.size()), 2, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) body(pieces[i], i);
  });
}

}  // namespace chorale::kernel::cpu
