// Products of f32 on NVIDIA GPUs with fewer digits.
#pragma once

namespace chorale {

// Off by default: f32 is multiplied as f32. When it is on, products and convolutions of f32 on a GPU round their
// operands to TF32, 10 bits behind the point, and add in f32: several times as fast, and exact to about 5e-4 of the
// largest terms. CHORALE_TF32=1 turns it on from the start. It holds for the whole process; nothing else looks at it.
bool tf32();
void set_tf32(bool on);

}  // namespace chorale
