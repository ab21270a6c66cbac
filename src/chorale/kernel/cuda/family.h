// What kernels of a family share on the side of the host: finding an instance of a template in a text, and grids.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "chorale/device/cuda/compiler.h"
#include "chorale/device/cuda/fault.h"
#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cuda/pointwise.h"
#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/stretch.h"

namespace chorale::kernel::cuda {

using chorale::cuda::blocks_for;
using chorale::cuda::fault_of;
using chorale::cuda::Grid;
using chorale::cuda::launch;

// The kernel "name<types…, more>" of a text that follows the prelude.
CUfunction instance(Stream stream, std::string_view text, const char* name, std::initializer_list<DType> types,
                    const char* more = nullptr);

// The number of the op's row, for faults; set by the layer above, which knows the ops.
using RowNumber = int64_t (*)(const KernelArgs& args);
void set_row_number(RowNumber number);
int64_t row_number(const KernelArgs& args);

// Threads of a block that works on a row of n elements.
unsigned row_threads(int64_t n);

// A stretch of random numbers as kernels take it (Drawn in prelude.cu).
struct Drawn {
  const int64_t* stretch = nullptr;
  int64_t step = 1;
  int64_t placed = 0;
  int64_t dims = 0;
  int64_t sizes[8] = {};
};
Drawn drawn_for(const Tensor& stretch, const Shape& sizes);

}  // namespace chorale::kernel::cuda
