// Products of the 16-bit types: accumulated in f32, rounded once.
#pragma once

#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu {

// f16 or bf16; no dimension but k is 0.
void half_product(const Product& p);

}  // namespace chorale::kernel::cpu
