// OpenBLAS, loaded at first use: products of f64 and of complex numbers.
#pragma once

#include <string>

namespace chorale::kernel::cpu::blas {

// The C interface, as far as we use it. Order, transpositions: CBLAS's enumerators below.
struct OpenBlas {
  static constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;
  void (*sgemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  void (*dgemm)(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);
  void (*cgemm)(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*, void*, int);
  void (*zgemm)(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*, void*, int);
  std::string core;     // the kernels it chose: "SkylakeX"
  std::string library;  // the file it came from
};

// Thread-safe. The first call loads the library (a few milliseconds) and may set OPENBLAS_CORETYPE in the environment.
// Throws StateError, saying what to install, where there is no OpenBLAS.
const OpenBlas& openblas();

// Empty if OpenBLAS can be used, else why not and what to install.
std::string openblas_trouble();

}  // namespace chorale::kernel::cpu::blas
