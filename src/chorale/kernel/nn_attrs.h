// Attributes of the neural-network ops.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale {

// What a loss does with the losses of single elements. kMean divides by their number, or by the sum of their weights.
enum class Reduction : uint8_t { kNone, kMean, kSum };

// How an image is resized: by the nearest pixel, or by weighing two (in two dimensions four).
enum class Interpolation : uint8_t { kNearest, kLinear };

namespace kernel {

// x is normalised over its last dimensions, which have these sizes.
struct LayerNormAttrs {
  IntList normalized_shape;
  double eps = 1e-5;
};
CHORALE_FIELDS(LayerNormAttrs, normalized_shape, eps)

// What the gradients of normalisations need.
struct LayerNormBackwardAttrs {
  IntList normalized_shape;
  bool affine = true;  // the gradients of weight and bias are asked for; otherwise they have no elements
  double eps = 0;      // of the normalisation
};
CHORALE_FIELDS(LayerNormBackwardAttrs, normalized_shape, affine, eps)

struct GroupNormAttrs {
  int64_t groups = 1;
  double eps = 1e-5;
};
CHORALE_FIELDS(GroupNormAttrs, groups, eps)

struct GroupNormBackwardAttrs {
  int64_t groups = 1;
  bool affine = true;
};
CHORALE_FIELDS(GroupNormBackwardAttrs, groups, affine)

struct BatchNormAttrs {
  double eps = 1e-5;
};
CHORALE_FIELDS(BatchNormAttrs, eps)

struct RunningAverageAttrs {
  double momentum = 0.1;
  double scale = 1;  // of the new value
};
CHORALE_FIELDS(RunningAverageAttrs, momentum, scale)

struct CrossEntropyAttrs {
  int64_t ignore_index = -100;  // targets of this value do not count
  double label_smoothing = 0;   // this much of the target goes to all classes alike
  Reduction reduction = Reduction::kMean;
};
CHORALE_FIELDS(CrossEntropyAttrs, ignore_index, label_smoothing, reduction)

struct NllLossAttrs {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::kMean;
};
CHORALE_FIELDS(NllLossAttrs, ignore_index, reduction)

struct NllLossBackwardAttrs {
  IntList sizes;  // of the logarithms of probabilities
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::kMean;
};
CHORALE_FIELDS(NllLossBackwardAttrs, sizes, ignore_index, reduction)

// Losses of a difference d, with a = |d|.
enum class Difference : uint8_t {
  kSquare,    // d^2
  kAbsolute,  // a
  kSmooth,    // d^2 / (2 bound) where a < bound, else a - bound / 2
  kHuber,     // d^2 / 2 where a <= bound, else bound * (a - bound / 2)
};
struct DifferenceLossAttrs {
  Difference kind = Difference::kSquare;
  double bound = 1;
  Reduction reduction = Reduction::kMean;
  int64_t count = 0;  // what a mean divides by, where x is a part of something larger; 0: by the elements of x
};
CHORALE_FIELDS(DifferenceLossAttrs, kind, bound, reduction, count)

// Which elements are dropped is a function of the stretch (kernel/stretch.h) and the element's place alone, so a
// gradient drops the same ones.
struct DropoutAttrs {
  double p = 0.5;
};
CHORALE_FIELDS(DropoutAttrs, p)

struct AttentionAttrs {
  double scale = 1;
  bool causal = false;   // query i sees keys 0 … i
  bool grouped = false;  // several heads of queries share one of keys and values
  double dropout_p = 0;
};
CHORALE_FIELDS(AttentionAttrs, scale, causal, grouped, dropout_p)

// There are one to three dimensions, and lists have an entry for each.
struct ConvolutionAttrs {
  SpatialList stride;
  SpatialList padding;
  SpatialList dilation;
  SpatialList result;  // its spatial sizes, in rows where shapes cannot tell them; empty in the others
  int64_t groups = 1;
};
CHORALE_FIELDS(ConvolutionAttrs, stride, padding, dilation, result, groups)

// Pooling in two dimensions: lists hold height and width.
struct PoolAttrs {
  SpatialList kernel, stride, padding, dilation;
  bool ceil_mode = false;  // a last window may reach beyond the input
};
CHORALE_FIELDS(PoolAttrs, kernel, stride, padding, dilation, ceil_mode)

struct AvgPoolAttrs {
  SpatialList kernel, stride, padding;
  bool ceil_mode = false;
  bool count_include_pad = true;
  int64_t divisor = 0;  // instead of the number of elements in a window, unless 0
};
CHORALE_FIELDS(AvgPoolAttrs, kernel, stride, padding, ceil_mode, count_include_pad, divisor)

struct AvgPoolBackwardAttrs {
  SpatialList kernel, stride, padding;
  bool ceil_mode = false;
  bool count_include_pad = true;
  int64_t divisor = 0;
  int64_t height = 0, width = 0;  // of the input
};
CHORALE_FIELDS(AvgPoolBackwardAttrs, kernel, stride, padding, ceil_mode, count_include_pad, divisor, height, width)

// The size of a result.
struct AreaAttrs {
  int64_t height = 1, width = 1;
};
CHORALE_FIELDS(AreaAttrs, height, width)

struct InterpolateAttrs {
  Interpolation mode = Interpolation::kNearest;
  bool align_corners = false;       // kLinear: the corners of input and result coincide
  int64_t height = 1, width = 1;    // of what comes out
  double ratio_h = 1, ratio_w = 1;  // a step in the enlarged image, in pixels of the original
};
CHORALE_FIELDS(InterpolateAttrs, mode, align_corners, height, width, ratio_h, ratio_w)

}  // namespace kernel
}  // namespace chorale
