// Vector loops of normalisation and loss kernels, on contiguous rows of f32 and f64: one thread, run-time dispatch, no
// alignment needed, n may be 0. A result may coincide with an input.
#pragma once

#include <cstdint>

namespace chorale::kernel::cpu {

// A number, or one per column: what a row is shifted and scaled by.
template <class T>
struct Factor {
  T value = 0;
  const T* values = nullptr;  // instead of `value` unless null

  Factor(T number) : value(number) {}            // NOLINT(google-explicit-constructor)
  Factor(const T* numbers) : values(numbers) {}  // NOLINT(google-explicit-constructor); null: use the other form
};

// y = (x - mean) * scale + shift
template <class T>
struct Standardize {
  Factor<T> mean, scale, shift;
};
void standardize_row(const float* x, const Standardize<float>& by, float* y, int64_t n);
void standardize_row(const double* x, const Standardize<double>& by, double* y, int64_t n);

// Sums of a row for the gradient of a normalisation, with g = dy * weight (1 if null) and z = (x - mean) * rstd.
template <class T>
struct NormSums {
  T g = 0;   // sum of g
  T gz = 0;  // sum of g * z
};
NormSums<float> norm_sums(const float* dy, const float* x, const float* weight, float mean, float rstd, int64_t n);
NormSums<double> norm_sums(const double* dy, const double* x, const double* weight, double mean, double rstd,
                           int64_t n);

// dx = (g - a - z * b) * rstd. Where they are not null, also dweight += dy * z and dbias += dy.
template <class T>
struct NormBackward {
  const T* weight;
  T mean, rstd, a, b;
  T* dweight;
  T* dbias;
};
void norm_backward_row(const float* dy, const float* x, const NormBackward<float>& by, float* dx, int64_t n);
void norm_backward_row(const double* dy, const double* x, const NormBackward<double>& by, double* dx, int64_t n);

// The same per column: sum_z += dy * (x - mean) * rstd and sum += dy, with one mean and rstd per column.
void add_column_sums(const float* dy, const float* x, const float* mean, const float* rstd, float* sum, float* sum_z,
                     int64_t n);
void add_column_sums(const double* dy, const double* x, const double* mean, const double* rstd, double* sum,
                     double* sum_z, int64_t n);

// dx = dy * p + (x - mean) * q + r
template <class T>
struct LinearBackward {
  Factor<T> mean, p, q, r;
};
void linear_backward_row(const float* dy, const float* x, const LinearBackward<float>& by, float* dx, int64_t n);
void linear_backward_row(const double* dy, const double* x, const LinearBackward<double>& by, double* dx, int64_t n);

// sum += (x - mean)^2 per column.
void add_column_squares(const float* x, const float* mean, float* sum, int64_t n);
void add_column_squares(const double* x, const double* mean, double* sum, int64_t n);

// y = exp(x - shift) * scale + offset
template <class T>
struct ExpAffine {
  Factor<T> shift, scale, offset;
};
void exp_affine_row(const float* x, const ExpAffine<float>& by, float* y, int64_t n);
void exp_affine_row(const double* x, const ExpAffine<double>& by, double* y, int64_t n);

}  // namespace chorale::kernel::cpu
