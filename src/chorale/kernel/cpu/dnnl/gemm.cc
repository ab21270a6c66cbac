#include "chorale/kernel/cpu/dnnl/gemm.h"

#include <oneapi/dnnl/dnnl.h>

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"

namespace chorale::kernel::cpu::dnnl {

void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  initialize();
  const dnnl_status_t status =
      dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  CHORALE_INVARIANT(status == dnnl_success, "dnnl_sgemm returned ", static_cast<int>(status), " for ", m, " x ", n,
                    " x ", k, ", leading dimensions ", lda, " ", ldb, " ", ldc);
}

}  // namespace chorale::kernel::cpu::dnnl
