// Products so small that the call into a library would cost more than the arithmetic, and products with a vector.
#pragma once

#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu {

// Does the whole of an f32 or f64 product, bias and kRelu included (no other epilogue), if its shape and strides suit
// the code here; otherwise returns false and has done nothing. k > 0. Vector loops for the running CPU.
bool small_product(const Product& p);

}  // namespace chorale::kernel::cpu
