#include "chorale/op/defs/image_rules.h"

#include "chorale/op/view.h"

namespace chorale::op {

AsImage::AsImage(const char* op, const Tensor& x, int64_t spatial)
    : spatial_(spatial), batched_(x.dims() == spatial + 2) {
  CHORALE_CHECK(x.dims() == spatial + 1 || x.dims() == spatial + 2, "[", op, "] x must be ",
                spatial == 1 ? "[N, C, L] or [C, L]" : "[N, C, H, W] or [C, H, W]", ", not ", x.sizes());
  image_ = batched_ ? x : unsqueeze(x, 0);
  if (spatial == 1) image_ = unsqueeze(image_, 2);
}

Tensor AsImage::back(Tensor y) const {
  if (spatial_ == 1) y = squeeze(y, {2});
  return batched_ ? y : squeeze(y, {0});
}

}  // namespace chorale::op
