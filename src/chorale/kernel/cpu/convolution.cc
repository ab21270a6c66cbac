#include "chorale/kernel/cpu/convolution.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/base/parallel.h"
#include "chorale/kernel/cpu/column_convolution.h"
#include "chorale/kernel/cpu/dnnl/convolution.h"
#include "chorale/kernel/cpu/scratch.h"

namespace chorale::kernel::cpu {
namespace {

struct Sizes {
  int64_t x, w, y;    // elements
  int64_t positions;  // of one channel of y
};

Sizes sizes_of(const Convolution& c) {
  CHORALE_CHECK(is_floating(c.dtype), "[convolution] expected a floating dtype, found ", c.dtype);
  CHORALE_INVARIANT(c.spatial >= 1 && c.spatial <= 3, "convolution in ", c.spatial, " dimensions");
  Sizes s{c.batch * c.in_channels, c.out_channels * (c.in_channels / c.groups), c.batch * c.out_channels, 1};
  for (size_t i = 0; i < static_cast<size_t>(c.spatial); ++i) {
    s.x *= c.in[i];
    s.w *= c.kernel[i];
    s.y *= c.out[i];
    s.positions *= c.out[i];
  }
  return s;
}

void zero(void* data, int64_t count, DType dtype) {
  // All bits zero is 0 in every dtype.
  if (data != nullptr) std::fill_n(static_cast<char*>(data), static_cast<size_t>(count) * size_of(dtype), 0);
}

// y += bias, one value per channel.
template <class T>
void add_bias(const Convolution& c, int64_t positions, const T* bias, T* y) {
  parallel_for(c.batch, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, c.out_channels * positions)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t image = begin; image < end; ++image) {
                   T* to = y + image * c.out_channels * positions;
                   if (c.channels_last) {
                     for (int64_t at = 0; at < positions; ++at) {
                       for (int64_t channel = 0; channel < c.out_channels; ++channel) *to++ += bias[channel];
                     }
                   } else {
                     for (int64_t channel = 0; channel < c.out_channels; ++channel) {
                       for (int64_t at = 0; at < positions; ++at) *to++ += bias[channel];
                     }
                   }
                 }
               });
}

// dbias = sum of dy over images and positions; sums in f64, so their length costs no accuracy.
template <class T>
void sum_to_bias(const Convolution& c, int64_t positions, const T* dy, T* dbias) {
  const Scratch space(static_cast<size_t>(c.out_channels) * sizeof(double));
  auto* sums = space.as<double>();
  parallel_for(c.out_channels, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, c.batch * positions)),
               [&](int64_t begin, int64_t end) {
                 std::fill(sums + begin, sums + end, 0.0);
                 for (int64_t image = 0; image < c.batch; ++image) {
                   const T* from = dy + image * c.out_channels * positions;
                   if (c.channels_last) {
                     for (int64_t at = 0; at < positions; ++at, from += c.out_channels) {
                       for (int64_t channel = begin; channel < end; ++channel) sums[channel] += double{from[channel]};
                     }
                   } else {
                     for (int64_t channel = begin; channel < end; ++channel) {
                       for (int64_t at = 0; at < positions; ++at)
                         sums[channel] += double{from[channel * positions + at]};
                     }
                   }
                 }
                 for (int64_t channel = begin; channel < end; ++channel) dbias[channel] = static_cast<T>(sums[channel]);
               });
}

void add_bias(const Convolution& c, int64_t positions, const void* bias, void* y) {
  if (c.dtype == DType::kF32) {
    add_bias(c, positions, static_cast<const float*>(bias), static_cast<float*>(y));
  } else {
    add_bias(c, positions, static_cast<const double*>(bias), static_cast<double*>(y));
  }
}

void real_forward(const Convolution& c, const Sizes& s, const void* x, const void* w, const void* bias, void* y) {
  if (s.x == 0) {
    zero(y, s.y, c.dtype);
  } else if (c.dtype == DType::kF32 && dnnl::convolution_forward(c, x, w, bias, y)) {
    return;
  } else {
    column_forward(c, x, w, y);
  }
  if (bias != nullptr) add_bias(c, s.positions, bias, y);
}

void real_backward_data(const Convolution& c, const void* dy, const void* w, void* dx) {
  if (c.dtype == DType::kF32 && dnnl::convolution_backward_data(c, dy, w, dx)) return;
  column_backward_data(c, dy, w, dx);
}

void real_backward_weights(const Convolution& c, int64_t positions, const void* x, const void* dy, void* dw,
                           void* dbias) {
  if (c.dtype == DType::kF32 && dw != nullptr && dnnl::convolution_backward_weights(c, x, dy, dw, dbias)) return;
  if (dw != nullptr) column_backward_weights(c, x, dy, dw);
  if (dbias == nullptr) return;
  if (c.dtype == DType::kF32) {
    sum_to_bias(c, positions, static_cast<const float*>(dy), static_cast<float*>(dbias));
  } else {
    sum_to_bias(c, positions, static_cast<const double*>(dy), static_cast<double*>(dbias));
  }
}

}  // namespace

void convolution_forward(const Convolution& c, const void* x, const void* w, const void* bias, void* y) {
  const Sizes s = sizes_of(c);
  if (s.y == 0) return;
  real_forward(c, s, x, w, bias, y);
}

void convolution_backward_data(const Convolution& c, const void* dy, const void* w, void* dx) {
  const Sizes s = sizes_of(c);
  if (s.x == 0 || s.y == 0) return zero(dx, s.x, c.dtype);
  real_backward_data(c, dy, w, dx);
}

void convolution_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw, void* dbias) {
  const Sizes s = sizes_of(c);
  if (s.x == 0 || s.y == 0) {
    zero(dw, s.w, c.dtype);
    zero(dbias, c.out_channels, c.dtype);
    return;
  }
  real_backward_weights(c, s.positions, x, dy, dw, dbias);
}

}  // namespace chorale::kernel::cpu
