// One pass over lists of parameters, gradients and states, cut among threads without regard to where a parameter ends.
// Inputs: lr, found_inf?, then the lists parameters, gradients, steps, states, masters?; results: the new values of all
// lists but the gradients. A result may be its input. Where found_inf is not 0, nothing changes.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void update_sgd(const KernelArgs& args);
void update_adam(const KernelArgs& args);
void update_adagrad(const KernelArgs& args);
void update_rmsprop(const KernelArgs& args);
void update_adadelta(const KernelArgs& args);
void update_adamax(const KernelArgs& args);
void update_nadam(const KernelArgs& args);
void update_radam(const KernelArgs& args);
void update_asgd(const KernelArgs& args);
void update_rprop(const KernelArgs& args);

// Lamb's step depends on norms of a whole parameter, so it has two passes: moments, and what they are needed for.
// Inputs as above; results: the new steps, moments and masters, and for each parameter the sums of squares of its
// weights and of its step.
void lamb_moments(const KernelArgs& args);
// Inputs: lr, found_inf?, then the lists parameters, steps, two moments, the two sums, masters?; results: parameters,
// masters.
void lamb_apply(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
