// Compiled functions: what a whole graph hands out when it has run.
#include "chorale/api/variant.h"
#include "chorale/autograd/autograd.h"

namespace chorale::compiled {

std::vector<Tensor> Frame::hand_out(const Variant& variant, const std::vector<Argument>& arguments,
                                    const std::vector<Tensor>& outside, const Segment::Results& made) const {
  const auto make = [&](const Left& left) {
    Tensor x;
    if (left.from == Left::From::kHandle) x = left.handle;
    if (left.from == Left::From::kWanted) x = made.wanted[left.index];
    if (left.from == Left::From::kOutside) {
      const size_t argument = variant.from_argument[left.index];
      if (left.is_itself && argument != kNowhere) return std::get<Tensor>(arguments[argument].value);
      if (left.is_itself) return left.whole ? left.handle : outside[left.index];
      x = outside[left.index];
      x = Tensor::on(x.storage(), left.layout.sizes, left.layout.strides, x.offset() + left.layout.offset,
                     left.layout.dtype);
    }
    if (left.whole) x = left.whole->around(std::move(x));
    if (left.root != kNowhere) variant.segment->set_history(made, left.root, x);
    return x;
  };
  std::vector<Tensor> results;
  for (const Left& left : variant.results) results.push_back(make(left));
  for (const auto& [leaf, left] : variant.left_gradients) set_gradient(leaf, make(left));
  for (const auto& settle : made.settle) settle();
  return results;
}

}  // namespace chorale::compiled
