#include "chorale/kernel/cpu/blas/openblas.h"

#include <dlfcn.h>

#include <cstdlib>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/kernel/cpu/support/cpu_probe.h"

namespace chorale::kernel::cpu::blas {
namespace {

// The OpenMP flavour first: the others bring a thread pool of their own, which would fight with ours.
constexpr const char* kLibraries[] = {
    "/usr/lib/x86_64-linux-gnu/openblas-openmp/libopenblas.so.0",
    "libopenblas.so.0",
};
constexpr const char* kAdvice = "; install libopenblas0-openmp (products of f64 and complex numbers need it)";

struct Loaded {
  OpenBlas table;
  std::string trouble;
};

// OpenBLAS 0.3.21 does not know newer CPUs and falls back to SSE kernels, a fifth of the speed, unless this variable
// names a core. It is read when the library is loaded, hence dlopen instead of linking. A user's own choice is
// respected.
void choose_core() {
  constexpr const char* kVariable = "OPENBLAS_CORETYPE";
  if (config::env(kVariable)) return;
  const CpuProbe& cpu = cpu_probe();
  if (cpu.avx512) {
    setenv(kVariable, "SkylakeX", 1);
  } else if (cpu.avx2) {
    setenv(kVariable, "Haswell", 1);
  }
}

template <class F>
void find(void* library, const char* name, F*& function, std::string& trouble) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (function == nullptr) trouble = concat("OpenBLAS has no function ", name, kAdvice);
}

Loaded load() {
  Loaded loaded;
  choose_core();
  void* library = nullptr;
  std::string reasons;
  for (const char* path : kLibraries) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      loaded.table.library = path;
      break;
    }
    reasons += concat(reasons.empty() ? "" : "; ", dlerror());
  }
  if (library == nullptr) {
    loaded.trouble = concat("OpenBLAS cannot be loaded (", reasons, ")", kAdvice);
    return loaded;
  }
  char* (*corename)() = nullptr;
  find(library, "cblas_sgemm", loaded.table.sgemm, loaded.trouble);
  find(library, "cblas_dgemm", loaded.table.dgemm, loaded.trouble);
  find(library, "cblas_cgemm", loaded.table.cgemm, loaded.trouble);
  find(library, "cblas_zgemm", loaded.table.zgemm, loaded.trouble);
  find(library, "openblas_get_corename", corename, loaded.trouble);
  if (corename != nullptr) loaded.table.core = corename();
  return loaded;
}

const Loaded& loaded() {
  static const Loaded instance = load();
  return instance;
}

}  // namespace

const OpenBlas& openblas() {
  CHORALE_CHECK_STATE(loaded().trouble.empty(), loaded().trouble);
  return loaded().table;
}

std::string openblas_trouble() { return loaded().trouble; }

}  // namespace chorale::kernel::cpu::blas
