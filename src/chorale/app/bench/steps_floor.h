// What a training step cannot be faster than: its products at their own shapes, by the better of oneDNN's two ways, one
// after the other, and the bytes that its update must read and write at memcpy's speed. One thread.
#pragma once

#include <string>

namespace chorale::app {

// Milliseconds; 0 for a model whose products are not known here (mlp512x4 and bert_256x4 are).
double step_floor_ms(const std::string& model);

}  // namespace chorale::app
