// Updates of optimizers and other rows over lists on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void copy_each(const KernelArgs& args);
void update_sgd(const KernelArgs& args);
void update_adam(const KernelArgs& args);
void update_adagrad(const KernelArgs& args);
void update_rmsprop(const KernelArgs& args);
void update_adadelta(const KernelArgs& args);
void update_adamax(const KernelArgs& args);
void update_nadam(const KernelArgs& args);
void update_radam(const KernelArgs& args);
void update_asgd(const KernelArgs& args);
void lamb_moments(const KernelArgs& args);
void lamb_apply(const KernelArgs& args);
void update_rprop(const KernelArgs& args);
void power_sums(const KernelArgs& args);
void clip_by_norm(const KernelArgs& args);
void clip_by_value(const KernelArgs& args);
void unscale(const KernelArgs& args);
void next_loss_scale(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
