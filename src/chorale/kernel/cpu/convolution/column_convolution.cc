#include "chorale/kernel/cpu/convolution/column_convolution.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/cpu/support/scratch.h"

// Shape letters: K = in_channels / groups * kernel volume, P = positions of y. For one image and one group,
//   y [out_channels / groups, P] = w [out_channels / groups, K] * columns [K, P],
// where columns holds, for each position, what the window sees there. It is made for a few rows of y at a time, so that
// it stays in the second-level cache.

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kColumnElems = 1 << 17;

// Everything in three dimensions (sizes of 1 in front) and with strides, so that both layouts of activations are one
// case.
template <class T>
struct Geometry {
  int64_t groups, channels_in, channels_out;  // per group
  int64_t in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  int64_t x_image, x_channel, x_at[3];
  int64_t y_image, y_channel, y_at;  // positions of y are evenly spaced
  int64_t depth, positions, rows;    // K, P, P / out[2]
  bool pointwise;                    // columns would be x itself

  explicit Geometry(const Convolution& c)
      : groups(c.groups), channels_in(c.in_channels / c.groups), channels_out(c.out_channels / c.groups) {
    const auto spread = [&](const std::array<int64_t, 3>& from, int64_t filler, int64_t* to) {
      std::fill_n(to, 3, filler);
      std::copy_n(from.begin(), c.spatial, to + 3 - c.spatial);
    };
    spread(c.in, 1, in);
    spread(c.out, 1, out);
    spread(c.kernel, 1, kernel);
    spread(c.stride, 1, stride);
    spread(c.pad, 0, pad);
    spread(c.dilation, 1, dilation);
    const int64_t in_positions = in[0] * in[1] * in[2];
    rows = out[0] * out[1];
    positions = rows * out[2];
    depth = channels_in * kernel[0] * kernel[1] * kernel[2];
    x_image = c.in_channels * in_positions;
    y_image = c.out_channels * positions;
    x_channel = c.channels_last ? 1 : in_positions;
    y_channel = c.channels_last ? 1 : positions;
    x_at[2] = c.channels_last ? c.in_channels : 1;
    y_at = c.channels_last ? c.out_channels : 1;
    x_at[1] = x_at[2] * in[2];
    x_at[0] = x_at[1] * in[1];
    pointwise = true;
    for (int i = 0; i < 3; ++i)
      pointwise = pointwise && kernel[i] == 1 && stride[i] == 1 && pad[i] == 0 && in[i] == out[i];
  }
  int64_t block_rows() const {
    return pointwise ? rows : std::clamp<int64_t>(kColumnElems / (depth * out[2]), 1, rows);
  }

  // Calls visit(column row, first position in the block, its element of x, how many) for each run of positions
  // inside x, and skip(column row, first position, how many) for each run outside.
  template <class Visit, class Skip>
  void windows(T* x, int64_t first_row, int64_t last_row, Visit&& visit, Skip&& skip) const {
    int64_t k = 0;
    for (int64_t channel = 0; channel < channels_in; ++channel) {
      for (int64_t kz = 0; kz < kernel[0]; ++kz) {
        for (int64_t ky = 0; ky < kernel[1]; ++ky) {
          for (int64_t kx = 0; kx < kernel[2]; ++kx, ++k) {
            // Positions ox with 0 <= ox * stride + shift < in.
            const int64_t shift = kx * dilation[2] - pad[2];
            const int64_t first = std::min(out[2], shift >= 0 ? 0 : (-shift + stride[2] - 1) / stride[2]);
            const int64_t last =
                std::clamp<int64_t>(shift >= in[2] ? 0 : (in[2] - 1 - shift) / stride[2] + 1, first, out[2]);
            for (int64_t row = first_row; row < last_row; ++row) {
              const int64_t iz = row / out[1] * stride[0] + kz * dilation[0] - pad[0];
              const int64_t iy = row % out[1] * stride[1] + ky * dilation[1] - pad[1];
              const int64_t at = (row - first_row) * out[2];
              if (iz < 0 || iz >= in[0] || iy < 0 || iy >= in[1] || first == last) {
                skip(k, at, out[2]);
                continue;
              }
              skip(k, at, first);
              visit(k, at + first,
                    x + channel * x_channel + iz * x_at[0] + iy * x_at[1] + (first * stride[2] + shift) * x_at[2],
                    last - first);
              skip(k, at + last, out[2] - last);
            }
          }
        }
      }
    }
  }
};

template <class T>
void gather(const Geometry<T>& g, const T* x, int64_t first_row, int64_t last_row, T* columns) {
  const int64_t width = (last_row - first_row) * g.out[2], step = g.stride[2] * g.x_at[2];
  g.windows(
      const_cast<T*>(x), first_row, last_row,
      [&](int64_t k, int64_t at, const T* from, int64_t count) {
        T* to = columns + k * width + at;
        for (int64_t i = 0; i < count; ++i) to[i] = from[i * step];
      },
      [&](int64_t k, int64_t at, int64_t count) { std::fill_n(columns + k * width + at, count, T(0)); });
}

// The transpose of gather: adds what each window has to the elements that it saw.
template <class T>
void scatter_add(const Geometry<T>& g, const T* columns, int64_t first_row, int64_t last_row, T* x) {
  const int64_t width = (last_row - first_row) * g.out[2], step = g.stride[2] * g.x_at[2];
  g.windows(
      x, first_row, last_row,
      [&](int64_t k, int64_t at, T* to, int64_t count) {
        const T* from = columns + k * width + at;
        for (int64_t i = 0; i < count; ++i) to[i * step] += from[i];
      },
      [](int64_t, int64_t, int64_t) {});
}

// Images in parallel where there are enough of them; else each product uses all threads.
template <class T, class Body>
void for_images(const Convolution& c, const Geometry<T>& g, Body&& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    const Scratch columns(g.pointwise ? 0 : static_cast<size_t>(g.depth * g.block_rows() * g.out[2]) * sizeof(T));
    for (int64_t i = begin; i < end; ++i) body(i, columns.as<T>());
  };
  if (c.batch < thread_count()) return range(0, c.batch);
  const int64_t work = g.groups * g.channels_out * g.positions * g.depth;
  parallel_for(c.batch, std::max<int64_t>(1, (1 << 16) / work), range);
}

template <class T>
void forward(const Convolution& c, const T* x, const T* w, T* y) {
  const Geometry<T> g(c);
  for_images(c, g, [&](int64_t image, T* columns) {
    for (int64_t group = 0; group < g.groups; ++group) {
      const T* from = x + image * g.x_image + group * g.channels_in * g.x_channel;
      T* to = y + image * g.y_image + group * g.channels_out * g.y_channel;
      for (int64_t row = 0; row < g.rows; row += g.block_rows()) {
        const int64_t end = std::min(g.rows, row + g.block_rows()), width = (end - row) * g.out[2];
        if (!g.pointwise) gather(g, from, row, end, columns);
        product({.dtype = dtype_of<T>,
                 .m = g.channels_out,
                 .n = width,
                 .k = g.depth,
                 .a = w + group * g.channels_out * g.depth,
                 .b = g.pointwise ? from : columns,
                 .c = to + row * g.out[2] * g.y_at,
                 .a_row = g.depth,
                 .a_col = 1,
                 .b_row = g.pointwise ? g.x_channel : width,
                 .b_col = g.pointwise ? g.x_at[2] : 1,
                 .c_row = g.y_channel,
                 .c_col = g.y_at});
      }
    }
  });
}

template <class T>
void backward_data(const Convolution& c, const T* dy, const T* w, T* dx) {
  const Geometry<T> g(c);
  for_images(c, g, [&](int64_t image, T* columns) {
    std::fill_n(dx + image * g.x_image, g.x_image, T(0));
    for (int64_t group = 0; group < g.groups; ++group) {
      const T* from = dy + image * g.y_image + group * g.channels_out * g.y_channel;
      T* to = dx + image * g.x_image + group * g.channels_in * g.x_channel;
      for (int64_t row = 0; row < g.rows; row += g.block_rows()) {
        const int64_t end = std::min(g.rows, row + g.block_rows()), width = (end - row) * g.out[2];
        product({.dtype = dtype_of<T>,
                 .m = g.depth,
                 .n = width,
                 .k = g.channels_out,
                 .a = w + group * g.channels_out * g.depth,
                 .b = from + row * g.out[2] * g.y_at,
                 .c = g.pointwise ? to : columns,
                 .a_row = 1,
                 .a_col = g.depth,
                 .b_row = g.y_channel,
                 .b_col = g.y_at,
                 .c_row = g.pointwise ? g.x_channel : width,
                 .c_col = g.pointwise ? g.x_at[2] : 1});
        if (!g.pointwise) scatter_add(g, columns, row, end, to);
      }
    }
  });
}

template <class T>
void backward_weights(const Convolution& c, const T* x, const T* dy, T* dw) {
  const Geometry<T> g(c);
  const Scratch space(g.pointwise ? 0 : static_cast<size_t>(g.depth * g.block_rows() * g.out[2]) * sizeof(T));
  T* columns = space.as<T>();
  // Images one after the other: their sum has one order, whatever the number of threads.
  for (int64_t group = 0; group < g.groups; ++group) {
    for (int64_t image = 0; image < c.batch; ++image) {
      const T* from = x + image * g.x_image + group * g.channels_in * g.x_channel;
      const T* slope = dy + image * g.y_image + group * g.channels_out * g.y_channel;
      for (int64_t row = 0; row < g.rows; row += g.block_rows()) {
        const int64_t end = std::min(g.rows, row + g.block_rows()), width = (end - row) * g.out[2];
        if (!g.pointwise) gather(g, from, row, end, columns);
        product({.dtype = dtype_of<T>,
                 .m = g.channels_out,
                 .n = g.depth,
                 .k = width,
                 .a = slope + row * g.out[2] * g.y_at,
                 .b = g.pointwise ? from : columns,
                 .c = dw + group * g.channels_out * g.depth,
                 .a_row = g.y_channel,
                 .a_col = g.y_at,
                 .b_row = g.pointwise ? g.x_at[2] : 1,
                 .b_col = g.pointwise ? g.x_channel : width,
                 .c_row = g.depth,
                 .c_col = 1,
                 .beta = image == 0 && row == 0 ? 0.0 : 1.0});
      }
    }
  }
}

// Calls f(TypeTag<float or double>).
template <class F>
void as_real(DType dtype, F&& f) {
  CHORALE_INVARIANT(dtype == DType::kF32 || dtype == DType::kF64, "columns of ", dtype);
  if (dtype == DType::kF32) {
    f(base::TypeTag<float>{});
  } else {
    f(base::TypeTag<double>{});
  }
}

}  // namespace

void column_forward(const Convolution& c, const void* x, const void* w, void* y) {
  as_real(c.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    forward(c, static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(y));
  });
}

void column_backward_data(const Convolution& c, const void* dy, const void* w, void* dx) {
  as_real(c.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    backward_data(c, static_cast<const T*>(dy), static_cast<const T*>(w), static_cast<T*>(dx));
  });
}

void column_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw) {
  as_real(c.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    backward_weights(c, static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dw));
  });
}

}  // namespace chorale::kernel::cpu
