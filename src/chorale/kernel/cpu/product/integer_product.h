// Products of integers: exact modulo the type, no library has them for every width.
#pragma once

#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu {

// k > 0, integral dtype, no bias, no epilogue.
void integer_product(const Product& p);

}  // namespace chorale::kernel::cpu
