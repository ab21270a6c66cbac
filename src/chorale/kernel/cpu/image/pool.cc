#include "chorale/kernel/cpu/image/pool.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/image/image_order.h"
#include "chorale/kernel/cpu/image/pool_loops.h"
#include "chorale/kernel/cpu/support/floating.h"

namespace chorale::kernel::cpu {
namespace {

// A pooling of [N, C, H, W]: the windows of every row and column of the result.
struct Pooling {
  int64_t N, C, H, W;
  std::vector<PoolSpan> rows, columns;
  // Windows `inner` … `inner_end` of a row lie inside the input and follow each other by `side`; none of an adaptive
  // pooling.
  PoolSide side;
  int64_t inner = 0, inner_end = 0;
  bool channels_last;

  // `window` is null for adaptive windows.
  Pooling(const Tensor& large, const Tensor& small, const PoolWindow* window)
      : N(large.size(0)), C(large.size(1)), H(large.size(2)), W(large.size(3)) {
    channels_last = !large.is_contiguous() || !small.is_contiguous();
    if (!window) {
      rows = adaptive_spans(H, small.size(2));
      columns = adaptive_spans(W, small.size(3));
      return;
    }
    side = window->width;
    rows = window_spans(window->height, H, small.size(2));
    columns = window_spans(side, W, small.size(3));
    const auto whole = [&](int64_t j) { return column(j).count() == side.kernel; };
    while (inner < width() && !whole(inner)) ++inner;
    for (inner_end = inner; inner_end < width() && whole(inner_end);) ++inner_end;
  }
  int64_t height() const { return static_cast<int64_t>(rows.size()); }
  int64_t width() const { return static_cast<int64_t>(columns.size()); }
  const PoolSpan& row(int64_t i) const { return rows[static_cast<size_t>(i)]; }
  const PoolSpan& column(int64_t j) const { return columns[static_cast<size_t>(j)]; }
  bool has_inner_loop() const { return inner < inner_end && side.stride <= 2; }
  template <class T>
  PoolRow<T> inner_windows(const T* plane, const PoolSpan& span) const {
    return {plane, W, span, column(inner).begin, side.stride, side.kernel, side.dilation, inner_end - inner};
  }
};

// Calls f(from, to, i) for every row i of every plane of the result (row-major), or of every sample (channels last):
// `from` is where the plane begins in the larger tensor, `to` where the row begins in the smaller one. Planes are cut
// among threads.
template <class F>
void for_rows(const Pooling& p, F&& f) {
  const int64_t channels = p.channels_last ? p.C : 1, planes = p.N * p.C / std::max<int64_t>(1, channels);
  parallel_for(planes, row_grain(p.H * p.W * channels), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      for (int64_t i = 0; i < p.height(); ++i) {
        f(plane * p.H * p.W * channels, (plane * p.height() + i) * p.width() * channels, i);
      }
    }
  });
}

// ---- the largest

void check_indices(const Tensor& indices, int64_t area) {
  const int64_t* index = indices.data<int64_t>();
  for (int64_t i = 0; i < indices.elems(); ++i) {
    CHORALE_CHECK(index[i] >= 0 && index[i] < area, "[max_pool_backward] index ", index[i], " is not within the ", area,
                  " elements of a plane");
  }
}

template <class T>
void max_window(const T* plane, const Pooling& p, const PoolSpan& rows, const PoolSpan& columns, T& y, int64_t& index) {
  y = -std::numeric_limits<T>::infinity();
  index = rows.begin * p.W + columns.begin;
  for (int64_t h = rows.begin; h < rows.end; h += rows.step) {
    for (int64_t w = columns.begin; w < columns.end; w += columns.step) {
      const T value = plane[h * p.W + w];
      if (value > y || std::isnan(value)) {
        y = value;
        index = h * p.W + w;
      }
    }
  }
}

template <class T>
void max_forward(const Pooling& p, const T* x, T* y, int64_t* indices) {
  for_rows(p, [&](int64_t from, int64_t to, int64_t i) {
    const PoolSpan& rows = p.row(i);
    if (p.channels_last) {
      for (int64_t j = 0; j < p.width(); ++j) {
        max_pool_place(PoolPlace<T>{x + from, p.W, p.C, rows, p.column(j)}, y + to + j * p.C, indices + to + j * p.C);
      }
      return;
    }
    const auto one = [&](int64_t j) { max_window(x + from, p, rows, p.column(j), y[to + j], indices[to + j]); };
    int64_t j = 0;
    for (; j < p.inner; ++j) one(j);
    if (p.has_inner_loop()) {
      max_pool_row(p.inner_windows(x + from, rows), y + to + j, indices + to + j);
      j = p.inner_end;
    }
    for (; j < p.width(); ++j) one(j);
  });
}

template <class T>
void max_backward(const Pooling& p, const T* dy, const int64_t* indices, T* dx) {
  const int64_t channels = p.channels_last ? p.C : 1;
  for_rows(p, [&](int64_t large, int64_t small, int64_t i) {
    if (i == 0) std::fill(dx + large, dx + large + p.H * p.W * channels, T(0));
    for (int64_t j = 0; j < p.width(); ++j, small += channels) {
      for (int64_t c = 0; c < channels; ++c) dx[large + indices[small + c] * channels + c] += dy[small + c];
    }
  });
}

// ---- the mean

// What windows are divided by.
struct Divisor {
  bool include_padding = true;
  int64_t fixed = 0;

  double of(const PoolSpan& rows, const PoolSpan& columns) const {
    if (fixed != 0) return static_cast<double>(fixed);
    return static_cast<double>(include_padding ? rows.padded * columns.padded : rows.count() * columns.count());
  }
};

template <class T>
T sum_window(const T* plane, const Pooling& p, const PoolSpan& rows, const PoolSpan& columns) {
  T sum = 0;
  constexpr int64_t kLong = 16;
  const bool is_long = columns.step == 1 && columns.count() >= kLong;
  for (int64_t h = rows.begin; h < rows.end; h += rows.step) {
    if (is_long) {
      vec::reduce_row(vec::ReduceOp::kSum, dtype_of<T>)(plane + h * p.W + columns.begin, columns.count(), &sum);
      continue;
    }
    for (int64_t w = columns.begin; w < columns.end; w += columns.step) sum += plane[h * p.W + w];
  }
  return sum;
}

template <class T>
void avg_forward(const Pooling& p, const Divisor& divisor, const T* x, T* y) {
  for_rows(p, [&](int64_t from, int64_t to, int64_t i) {
    const PoolSpan& rows = p.row(i);
    const auto scale = [&](int64_t j) { return static_cast<T>(1 / divisor.of(rows, p.column(j))); };
    if (p.channels_last) {
      for (int64_t j = 0; j < p.width(); ++j) {
        avg_pool_place(PoolPlace<T>{x + from, p.W, p.C, rows, p.column(j)}, scale(j), y + to + j * p.C);
      }
      return;
    }
    const auto one = [&](int64_t j) { y[to + j] = sum_window(x + from, p, rows, p.column(j)) * scale(j); };
    int64_t j = 0;
    for (; j < p.inner; ++j) one(j);
    if (p.has_inner_loop()) {
      avg_pool_row(p.inner_windows(x + from, rows), scale(j), y + to + j);
      j = p.inner_end;
    }
    for (; j < p.width(); ++j) one(j);
  });
}

template <class T>
void avg_backward(const Pooling& p, const Divisor& divisor, const T* dy, T* dx) {
  const int64_t channels = p.channels_last ? p.C : 1;
  for_rows(p, [&](int64_t large, int64_t small, int64_t i) {
    if (i == 0) std::fill(dx + large, dx + large + p.H * p.W * channels, T(0));
    const PoolSpan& rows = p.row(i);
    for (int64_t j = 0; j < p.width(); ++j) {
      const PoolSpan& columns = p.column(j);
      const T scale = static_cast<T>(1 / divisor.of(rows, columns));
      const T* g = dy + small + j * channels;
      for (int64_t h = rows.begin; h < rows.end; h += rows.step) {
        for (int64_t w = columns.begin; w < columns.end; w += columns.step) {
          T* to = dx + large + (h * p.W + w) * channels;
          if (p.channels_last) {
            vec::axpy(scale, g, to, channels);
          } else {
            *to += *g * scale;
          }
        }
      }
    }
  });
}

void max_any(const KernelArgs& args, const PoolWindow* window) {
  with_images(args, [&]<class T>(const Tensor& x, const Tensor& y, T) {
    max_forward(Pooling(x, y, window), x.data<T>(), y.data<T>(), args.out[1].data<int64_t>());
  });
}
void avg_any(const KernelArgs& args, const PoolWindow* window, const Divisor& divisor) {
  with_images(args, [&]<class T>(const Tensor& x, const Tensor& y, T) {
    avg_forward(Pooling(x, y, window), divisor, x.data<T>(), y.data<T>());
  });
}
void avg_any_backward(const KernelArgs& args, const PoolWindow* window, const Divisor& divisor) {
  with_images(args, [&]<class T>(const Tensor& dy, const Tensor& dx, T) {
    avg_backward(Pooling(dx, dy, window), divisor, dy.data<T>(), dx.data<T>());
  });
}

}  // namespace

void max_pool(const KernelArgs& args) {
  const PoolWindow window = window_of(args.attrs.get<PoolAttrs>());
  max_any(args, &window);
}
void adaptive_max_pool(const KernelArgs& args) { max_any(args, nullptr); }

void max_pool_backward(const KernelArgs& args) {
  const Tensor indices = in_order(args.in[1], is_channels_last(args), DType::kI64);
  check_indices(indices, args.out[0].size(2) * args.out[0].size(3));
  with_images(args, [&]<class T>(const Tensor& dy, const Tensor& dx, T) {
    max_backward(Pooling(dx, dy, nullptr), dy.data<T>(), indices.data<int64_t>(), dx.data<T>());
  });
}

void avg_pool(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AvgPoolAttrs>();
  const PoolWindow window = window_of(attrs);
  avg_any(args, &window, {attrs.count_include_pad, attrs.divisor});
}
void adaptive_avg_pool(const KernelArgs& args) { avg_any(args, nullptr, {}); }

void avg_pool_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AvgPoolBackwardAttrs>();
  const PoolWindow window = window_of(attrs);
  avg_any_backward(args, &window, {attrs.count_include_pad, attrs.divisor});
}
void adaptive_avg_pool_backward(const KernelArgs& args) { avg_any_backward(args, nullptr, {}); }

}  // namespace chorale::kernel::cpu
