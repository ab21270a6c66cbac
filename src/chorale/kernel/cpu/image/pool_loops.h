// Vector loops of pooling: one thread, run-time dispatch. T is f32 or f64.
#pragma once

#include <cstdint>

#include "chorale/kernel/pool_window.h"

namespace chorale::kernel::cpu {

// Neighbouring windows of a row-major plane that lie inside it: all span `rows`, and window j begins at column
// first + j * stride, of `kernel` elements `dilation` apart.
template <class T>
struct PoolRow {
  const T* plane;
  int64_t width;
  PoolSpan rows;
  int64_t first, stride, kernel, dilation;
  int64_t count;  // windows
};
// These four are for a stride of 1 or 2.
void max_pool_row(const PoolRow<float>& row, float* y, int64_t* indices);
void max_pool_row(const PoolRow<double>& row, double* y, int64_t* indices);
void avg_pool_row(const PoolRow<float>& row, float scale, float* y);
void avg_pool_row(const PoolRow<double>& row, double scale, double* y);

// One window of an image whose channels are innermost: all channels of a place of the result.
template <class T>
struct PoolPlace {
  const T* image;
  int64_t width, channels;
  PoolSpan rows, columns;
};
void max_pool_place(const PoolPlace<float>& place, float* y, int64_t* indices);
void max_pool_place(const PoolPlace<double>& place, double* y, int64_t* indices);
void avg_pool_place(const PoolPlace<float>& place, float scale, float* y);
void avg_pool_place(const PoolPlace<double>& place, double scale, double* y);

}  // namespace chorale::kernel::cpu
