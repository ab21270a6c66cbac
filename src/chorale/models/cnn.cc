#include "chorale/models/cnn.h"

#include "chorale/nn/nn.h"

namespace chorale::models {

nn::Sequential fashion_cnn(int64_t classes) {
  return nn::Sequential(nn::Conv2d(1, 32, {.kernel = 3, .padding = 1}), nn::BatchNorm2d(32), nn::ReLU(),
                        nn::MaxPool2d(2),  // 14 x 14
                        nn::Conv2d(32, 64, {.kernel = 3, .padding = 1}), nn::BatchNorm2d(64), nn::ReLU(),
                        nn::MaxPool2d(2),  // 7 x 7
                        nn::Flatten(), nn::Linear(64 * 7 * 7, 128), nn::ReLU(), nn::Linear(128, classes));
}

}  // namespace chorale::models
