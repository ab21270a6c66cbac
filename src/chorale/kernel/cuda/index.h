// Elements picked and placed by index, on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void embedding(const KernelArgs& args);
void embedding_backward(const KernelArgs& args);
void embedding_bag(const KernelArgs& args);
void embedding_bag_backward(const KernelArgs& args);
void embedding_bag_weights_backward(const KernelArgs& args);
void index_select(const KernelArgs& args);
void index_select_backward(const KernelArgs& args);
void index_add(const KernelArgs& args);
void index_copy(const KernelArgs& args);
void index_fill(const KernelArgs& args);
void gather(const KernelArgs& args);
void gather_backward(const KernelArgs& args);
void scatter(const KernelArgs& args);
void scatter_fill(const KernelArgs& args);
void scatter_add(const KernelArgs& args);
void index(const KernelArgs& args);
void index_backward(const KernelArgs& args);
void index_put(const KernelArgs& args);
void one_hot(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
