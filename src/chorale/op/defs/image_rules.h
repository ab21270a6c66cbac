// What rows of images [N, C, H, W] share.
#pragma once

#include <string>

#include "chorale/op/op_def.h"

namespace chorale::op {

inline void check_image(const InferArgs& args, const Tensor& x) {
  CHORALE_CHECK(x.dims() == 4, "[", args.op.name, "] x must be [N, C, H, W], not ", x.sizes());
  CHORALE_CHECK(x.size(2) * x.size(3) < int64_t{1} << 31, "[", args.op.name, "] planes of ", x.size(2), " x ",
                x.size(3), " are too large");
}

// [N, C, height, width] in x's memory order: row-major, or channels last.
inline void describe_image(OutSpec& out, const Tensor& x, int64_t height, int64_t width, DType dtype) {
  out.sizes = {x.size(0), x.size(1), height, width};
  out.dtype = dtype;
  out.device = x.device();
  if (x.is_contiguous() || !x.is_channels_last()) return;
  out.strides = channels_last_strides(out.sizes);
  out.strided = true;
}

// Samples and channels may be split.
inline constexpr ShardRule kShardImage{.labels = "ncHW->ncYX"};
inline constexpr ShardRule kShardImageAndIndices{.labels = "ncHW->ncYX,ncYX"};

// x as [N, C, H, W]: a batch of one where the samples are missing, H = 1 where there is one dimension; and back.
class AsImage {
 public:
  // `spatial` is 1 or 2.
  AsImage(const char* op, const Tensor& x, int64_t spatial);
  const Tensor& image() const { return image_; }
  Tensor back(Tensor y) const;

 private:
  int64_t spatial_;
  bool batched_;
  Tensor image_;
};

}  // namespace chorale::op
