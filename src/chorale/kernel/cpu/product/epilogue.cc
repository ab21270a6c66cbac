#include "chorale/kernel/cpu/product/epilogue.h"

#include <algorithm>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

vec::Loop activation(Epilogue epilogue, DType dtype) {
  switch (epilogue) {
    case Epilogue::kNone:
      return nullptr;
    case Epilogue::kRelu:
      return vec::pointwise_loop(vec::ScalarOp::kRelu, dtype);
    case Epilogue::kGeluErf:
      return vec::pointwise_loop(vec::ScalarOp::kGeluErf, dtype);
    case Epilogue::kGeluTanh:
      return vec::pointwise_loop(vec::ScalarOp::kGeluTanh, dtype);
  }
  __builtin_unreachable();
}

}  // namespace

void finish(DType dtype, void* c, int64_t m, int64_t n, int64_t c_row, int64_t c_col, const void* bias,
            Epilogue epilogue) {
  if (bias == nullptr && epilogue == Epilogue::kNone) return;
  const vec::Loop add = vec::pointwise_loop(vec::ScalarOp::kAdd, dtype), act = activation(epilogue, dtype);
  const auto elem = static_cast<int64_t>(size_of(dtype));
  parallel_for(m, std::max<int64_t>(1, (1 << 15) / n), [&](int64_t begin, int64_t end) {
    // Rows that are not contiguous are worked on in a copy.
    const Scratch copy(c_col == 1 ? 0 : static_cast<size_t>(n * elem));
    for (int64_t i = begin; i < end; ++i) {
      char* row = static_cast<char*>(c) + i * c_row * elem;
      void* x = c_col == 1 ? row : copy.as<void>();
      if (c_col != 1) vec::gather_strided(row, c_col * elem, x, n, size_of(dtype));
      const void* in[] = {x, bias};
      if (bias != nullptr) add(in, x, n, {});
      if (act != nullptr) act(in, x, n, {});
      if (c_col != 1) vec::scatter_strided(x, row, c_col * elem, n, size_of(dtype));
    }
  });
}

}  // namespace chorale::kernel::cpu
