// Residual networks for images [N, 3, H, W], with torchvision's names and shapes.
#pragma once

#include <array>
#include <optional>

#include "chorale/nn/container.h"
#include "chorale/nn/conv.h"
#include "chorale/nn/linear.h"
#include "chorale/nn/norm.h"

namespace chorale::models {

// Two convolutions of 3 x 3, added to what came in.
struct BasicBlock : nn::Module {
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  std::optional<nn::Sequential> downsample;  // brings what came in to the result's shape
  CHORALE_MODULE(BasicBlock, conv1, bn1, conv2, bn2, downsample)

  static constexpr int64_t kExpansion = 1;  // of the width by the block
  BasicBlock(int64_t in, int64_t width, int64_t stride);
  Tensor forward(const Tensor& x);
};

// Convolutions of 1 x 1, 3 x 3 and 1 x 1, the last four times as wide.
struct Bottleneck : nn::Module {
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d conv3;
  nn::BatchNorm2d bn3;
  std::optional<nn::Sequential> downsample;
  CHORALE_MODULE(Bottleneck, conv1, bn1, conv2, bn2, conv3, bn3, downsample)

  static constexpr int64_t kExpansion = 4;
  Bottleneck(int64_t in, int64_t width, int64_t stride);
  Tensor forward(const Tensor& x);
};

struct ResNet : nn::Module {
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Sequential layer1, layer2, layer3, layer4;  // each but the first halves the image
  nn::Linear fc;
  CHORALE_MODULE(ResNet, conv1, bn1, layer1, layer2, layer3, layer4, fc)

  Tensor forward(const Tensor& x);  // logits [N, classes]

 private:
  friend ResNet resnet18(int64_t classes);
  friend ResNet resnet50(int64_t classes);
  template <class Block>
  static ResNet make(const std::array<int64_t, 4>& blocks, int64_t classes);
  ResNet(std::array<nn::Sequential, 4> layers, int64_t features, int64_t classes);
};

ResNet resnet18(int64_t classes = 1000);
ResNet resnet50(int64_t classes = 1000);

}  // namespace chorale::models
