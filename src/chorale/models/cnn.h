// A small convolutional network for grey images of 28 x 28, as in Fashion-MNIST.
#pragma once

#include "chorale/nn/container.h"

namespace chorale::models {

// [N, 1, 28, 28] to logits [N, classes]: two times convolution, batch norm, ReLU and pooling, then two linear layers.
nn::Sequential fashion_cnn(int64_t classes = 10);

}  // namespace chorale::models
