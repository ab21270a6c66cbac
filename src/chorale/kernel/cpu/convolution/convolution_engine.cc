#include "chorale/kernel/cpu/convolution/convolution_engine.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/same_bits.h"
#include "chorale/kernel/cpu/convolution/column_convolution.h"
#include "chorale/kernel/cpu/dnnl/convolution.h"
#include "chorale/kernel/cpu/dnnl/matmul.h"
#include "chorale/kernel/cpu/support/one_thread.h"
#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/vec/loops.h"

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

// The f32 stand-in for a 16-bit array; a null one has none.
class Stand {
 public:
  Stand(DType dtype, const void* data, int64_t count)
      : dtype_(dtype), count_(data == nullptr ? 0 : count), space_(static_cast<size_t>(count_) * sizeof(float)) {}
  float* data() const { return space_.as<float>(); }
  const Stand& load(const void* from) const {
    convert(dtype_, DType::kF32, from, data());
    return *this;
  }
  void store(void* to) const { convert(DType::kF32, dtype_, data(), to); }

 private:
  void convert(DType from, DType to, const void* in, void* out) const {
    const vec::Convert loop = vec::convert_loop(from, to);
    parallel_for(count_, 1 << 15, [&](int64_t begin, int64_t end) {
      const auto at = [&](DType dtype) { return begin * static_cast<int64_t>(size_of(dtype)); };
      loop(static_cast<const char*>(in) + at(from), static_cast<char*>(out) + at(to), end - begin);
    });
  }
  DType dtype_;
  int64_t count_;
  Scratch space_;
};

Convolution in_f32(Convolution c) {
  c.dtype = DType::kF32;
  return c;
}

bool has_native(const Convolution& c) { return c.dtype == DType::kBF16 && dnnl::has_fast_bf16(); }

}  // namespace

void convolution_forward(const Convolution& c, const void* x, const void* w, const void* bias, void* y) {
  const Sizes s = sizes_of(c);
  if (s.y == 0) return;
  if (!is_half(c.dtype)) return real_forward(c, s, x, w, bias, y);
  if (s.x > 0 && has_native(c) && dnnl::convolution_forward(c, x, w, bias, y)) return;
  const Stand x32(c.dtype, x, s.x), w32(c.dtype, w, s.w), bias32(c.dtype, bias, c.out_channels), y32(c.dtype, y, s.y);
  real_forward(in_f32(c), s, x32.load(x).data(), w32.load(w).data(), bias32.load(bias).data(), y32.data());
  y32.store(y);
}

void convolution_backward_data(const Convolution& c, const void* dy, const void* w, void* dx) {
  const Sizes s = sizes_of(c);
  if (s.x == 0 || s.y == 0) return zero(dx, s.x, c.dtype);
  if (!is_half(c.dtype)) return real_backward_data(c, dy, w, dx);
  if (has_native(c) && dnnl::convolution_backward_data(c, dy, w, dx)) return;
  const Stand dy32(c.dtype, dy, s.y), w32(c.dtype, w, s.w), dx32(c.dtype, dx, s.x);
  real_backward_data(in_f32(c), dy32.load(dy).data(), w32.load(w).data(), dx32.data());
  dx32.store(dx);
}

void convolution_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw, void* dbias) {
  const Sizes s = sizes_of(c);
  if (s.x == 0 || s.y == 0) {
    zero(dw, s.w, c.dtype);
    zero(dbias, c.out_channels, c.dtype);
    return;
  }
  const OneThread alone(same_bits());  // the library sums over images in an order of the threads
  if (!is_half(c.dtype)) return real_backward_weights(c, s.positions, x, dy, dw, dbias);
  if (dw != nullptr && has_native(c) && dnnl::convolution_backward_weights(c, x, dy, dw, dbias)) return;
  const Stand x32(c.dtype, dw == nullptr ? nullptr : x, s.x), dy32(c.dtype, dy, s.y), dw32(c.dtype, dw, s.w),
      dbias32(c.dtype, dbias, c.out_channels);
  real_backward_weights(in_f32(c), s.positions, x32.load(x).data(), dy32.load(dy).data(), dw32.data(), dbias32.data());
  dw32.store(dw);
  dbias32.store(dbias);
}

}  // namespace chorale::kernel::cpu
