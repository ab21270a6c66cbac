#include "chorale/models/resnet.h"

#include "chorale/api/api.h"
#include "chorale/nn/init.h"

namespace chorale::models {
namespace {

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  nn::Conv2d layer(in, out, {.kernel = kernel, .stride = stride, .padding = kernel / 2, .bias = false});
  nn::init::kaiming_normal_(layer.weight,
                            {.mode = nn::init::FanMode::kOut, .nonlinearity = nn::init::Nonlinearity::kRelu});
  return layer;
}

std::optional<nn::Sequential> shortcut(int64_t in, int64_t out, int64_t stride) {
  if (stride == 1 && in == out) return {};
  return nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out));
}

template <class Block>
nn::Sequential stage(int64_t in, int64_t width, int64_t blocks, int64_t stride) {
  nn::Sequential layers(Block(in, width, stride));
  for (int64_t i = 1; i < blocks; ++i) layers.add(Block(Block::kExpansion * width, width, 1));
  return layers;
}

}  // namespace

BasicBlock::BasicBlock(int64_t in, int64_t width, int64_t stride)
    : conv1(conv(in, width, 3, stride)),
      bn1(width),
      conv2(conv(width, width, 3, 1)),
      bn2(width),
      downsample(shortcut(in, width, stride)) {}

Tensor BasicBlock::forward(const Tensor& x) {
  const Tensor y = bn2(conv2(relu(bn1(conv1(x)))));
  return relu(y + (downsample ? (*downsample)(x) : x));
}

Bottleneck::Bottleneck(int64_t in, int64_t width, int64_t stride)
    : conv1(conv(in, width, 1, 1)),
      bn1(width),
      conv2(conv(width, width, 3, stride)),
      bn2(width),
      conv3(conv(width, kExpansion * width, 1, 1)),
      bn3(kExpansion * width),
      downsample(shortcut(in, kExpansion * width, stride)) {}

Tensor Bottleneck::forward(const Tensor& x) {
  const Tensor y = bn3(conv3(relu(bn2(conv2(relu(bn1(conv1(x))))))));
  return relu(y + (downsample ? (*downsample)(x) : x));
}

ResNet::ResNet(std::array<nn::Sequential, 4> layers, int64_t features, int64_t classes)
    : conv1(conv(3, 64, 7, 2)),
      bn1(64),
      layer1(std::move(layers[0])),
      layer2(std::move(layers[1])),
      layer3(std::move(layers[2])),
      layer4(std::move(layers[3])),
      fc(features, classes) {}

template <class Block>
ResNet ResNet::make(const std::array<int64_t, 4>& blocks, int64_t classes) {
  constexpr int64_t kWider = Block::kExpansion;
  return ResNet({stage<Block>(64, 64, blocks[0], 1), stage<Block>(64 * kWider, 128, blocks[1], 2),
                 stage<Block>(128 * kWider, 256, blocks[2], 2), stage<Block>(256 * kWider, 512, blocks[3], 2)},
                512 * kWider, classes);
}

Tensor ResNet::forward(const Tensor& x) {
  const Tensor stem = max_pool2d(relu(bn1(conv1(x))), 3, 2, 1);
  const Tensor features = layer4(layer3(layer2(layer1(stem))));
  return fc(flatten(adaptive_avg_pool2d(features, 1), 1));
}

ResNet resnet18(int64_t classes) { return ResNet::make<BasicBlock>({2, 2, 2, 2}, classes); }
ResNet resnet50(int64_t classes) { return ResNet::make<Bottleneck>({3, 4, 6, 3}, classes); }

}  // namespace chorale::models
