#include "chorale/kernel/cpu/epilogue.h"

#include <cmath>

namespace chorale::kernel::cpu {
namespace {

template <class T>
T apply(Epilogue epilogue, T x) {
  switch (epilogue) {
    case Epilogue::kNone:
      return x;
    case Epilogue::kRelu:
      return x < T(0) ? T(0) : x;  // NaN stays
    case Epilogue::kGeluErf:
      return T(0.5) * x * (T(1) + std::erf(x * T(0.70710678118654752440)));
    case Epilogue::kGeluTanh:
      return T(0.5) * x * (T(1) + std::tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
  }
  __builtin_unreachable();
}

template <class T>
void finish(T* x, const T* bias, Epilogue epilogue, int64_t n) {
  if (bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
  }
  if (epilogue == Epilogue::kNone) return;
  for (int64_t i = 0; i < n; ++i) x[i] = apply(epilogue, x[i]);
}

}  // namespace

void finish_row(float* x, const float* bias, Epilogue epilogue, int64_t n) { finish(x, bias, epilogue, n); }
void finish_row(double* x, const double* bias, Epilogue epilogue, int64_t n) { finish(x, bias, epilogue, n); }

}  // namespace chorale::kernel::cpu
