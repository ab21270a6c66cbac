#include "chorale/kernel/cpu/image/interpolate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/image/image_order.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// Where a place of the resized image comes from, along one dimension: two places of the original and what they weigh.
struct Source {
  int64_t first, second;
  double first_weight, second_weight;
};

std::vector<Source> sources(Interpolation mode, bool align_corners, int64_t original, int64_t resized, double ratio) {
  std::vector<Source> result;
  for (int64_t i = 0; i < resized; ++i) {
    if (mode == Interpolation::kNearest) {
      // Computed in f32, as PyTorch does: a ratio like 1 / 3 would pick other pixels in another dtype.
      const auto at = static_cast<int64_t>(std::floor(static_cast<float>(i) * static_cast<float>(ratio)));
      const int64_t pixel = std::min(at, original - 1);
      result.push_back({pixel, pixel, 1, 0});
      continue;
    }
    double at = std::max(0.0, (static_cast<double>(i) + 0.5) * ratio - 0.5);
    if (align_corners)
      at = resized > 1 ? static_cast<double>(i) * static_cast<double>(original - 1) / static_cast<double>(resized - 1)
                       : 0;
    const int64_t pixel = std::min(static_cast<int64_t>(at), original - 1);
    const double weight = std::min(at - static_cast<double>(pixel), 1.0);
    result.push_back({pixel, std::min(pixel + 1, original - 1), 1 - weight, weight});
  }
  return result;
}

struct Resizing {
  int64_t planes, channels;  // row-major: planes of one channel; channels last: samples of all
  int64_t W, area;           // of the original
  std::vector<Source> rows, columns;
  bool nearest;

  Resizing(const Tensor& original, const Tensor& resized, const InterpolateAttrs& attrs)
      : W(original.size(3)), area(original.size(2) * original.size(3)), nearest(attrs.mode == Interpolation::kNearest) {
    channels = original.is_contiguous() && resized.is_contiguous() ? 1 : original.size(1);
    planes = original.size(0) * original.size(1) / std::max<int64_t>(1, channels);
    rows = sources(attrs.mode, attrs.align_corners, original.size(2), resized.size(2), attrs.ratio_h);
    columns = sources(attrs.mode, attrs.align_corners, original.size(3), resized.size(3), attrs.ratio_w);
  }
  // Calls f(plane, row, at): `at` is where that row of the resized image begins. Planes are cut among threads.
  template <class F>
  void for_rows(F&& f) const {
    const auto height = static_cast<int64_t>(rows.size()), width = static_cast<int64_t>(columns.size());
    parallel_for(planes, row_grain(height * width * channels), [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        for (int64_t i = 0; i < height; ++i) {
          f(plane * area * channels, rows[static_cast<size_t>(i)], (plane * height + i) * width * channels);
        }
      }
    });
  }
};

template <class T>
void forward(const Resizing& r, const T* x, T* y) {
  const int64_t C = r.channels;
  r.for_rows([&](int64_t plane, const Source& row, int64_t at) {
    const T* top = x + plane + row.first * r.W * C;
    const T* bottom = x + plane + row.second * r.W * C;
    const T p = static_cast<T>(row.first_weight), q = static_cast<T>(row.second_weight);
    T* to = y + at;
    for (const Source& column : r.columns) {
      const int64_t left = column.first * C, right = column.second * C;
      if (r.nearest) {
        std::memcpy(to, top + left, static_cast<size_t>(C) * sizeof(T));
      } else {
        const T a = static_cast<T>(column.first_weight), b = static_cast<T>(column.second_weight);
        for (int64_t c = 0; c < C; ++c) {
          to[c] = p * (a * top[left + c] + b * top[right + c]) + q * (a * bottom[left + c] + b * bottom[right + c]);
        }
      }
      to += C;
    }
  });
}

template <class T>
void backward(const Resizing& r, const T* dy, T* dx, int64_t elems) {
  std::fill(dx, dx + elems, T(0));
  const int64_t C = r.channels;
  r.for_rows([&](int64_t plane, const Source& row, int64_t at) {
    T* top = dx + plane + row.first * r.W * C;
    T* bottom = dx + plane + row.second * r.W * C;
    const T p = static_cast<T>(row.first_weight), q = static_cast<T>(row.second_weight);
    const T* g = dy + at;
    for (const Source& column : r.columns) {
      const int64_t left = column.first * C, right = column.second * C;
      const T a = static_cast<T>(column.first_weight), b = static_cast<T>(column.second_weight);
      for (int64_t c = 0; c < C; ++c) {
        top[left + c] += p * a * g[c];
        if (r.nearest) continue;
        top[right + c] += p * b * g[c];
        bottom[left + c] += q * a * g[c];
        bottom[right + c] += q * b * g[c];
      }
      g += C;
    }
  });
}

}  // namespace

void interpolate(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<InterpolateAttrs>();
  with_images(args, [&]<class T>(const Tensor& x, const Tensor& y, T) {
    forward(Resizing(x, y, attrs), x.data<T>(), y.data<T>());
  });
}

void interpolate_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<InterpolateAttrs>();
  with_images(args, [&]<class T>(const Tensor& dy, const Tensor& dx, T) {
    backward(Resizing(dx, dy, attrs), dy.data<T>(), dx.data<T>(), dx.elems());
  });
}

}  // namespace chorale::kernel::cpu
