#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// Random words that an element of each distribution takes; element i begins at word i times this.
int64_t words_per_element(DType dtype);  // uniform, normal: 1, or 2 for f64
inline constexpr int64_t kWordsPerInteger = 2;

void uniform(const KernelArgs& args);
void normal(const KernelArgs& args);
void randint(const KernelArgs& args);
void randperm(const KernelArgs& args);
void bernoulli(const KernelArgs& args);
void multinomial(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
