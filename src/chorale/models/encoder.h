// A pre-norm transformer encoder over tokens, without mask: the model of the benchmark bert_256x4.
#pragma once

#include <vector>

#include "chorale/nn/linear.h"
#include "chorale/nn/norm.h"

namespace chorale::models {

struct EncoderConfig {
  int64_t vocabulary = 8192;
  int64_t width = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t length = 128;  // the most tokens of a sequence
};

// Attention and a network of two layers, each behind a norm and added to what came in.
struct EncoderBlock : nn::Module {
  nn::LayerNorm ln1;
  nn::Linear qkv, out;
  nn::LayerNorm ln2;
  nn::Linear up, down;
  int64_t heads;
  CHORALE_MODULE(EncoderBlock, ln1, qkv, out, ln2, up, down)

  EncoderBlock(int64_t width, int64_t heads);
  Tensor forward(const Tensor& x);
};

struct Encoder : nn::Module {
  nn::Embedding token, position;
  std::vector<EncoderBlock> blocks;
  nn::LayerNorm ln;
  nn::Linear head;
  CHORALE_MODULE(Encoder, token, position, blocks, ln, head)

  explicit Encoder(const EncoderConfig& config = {});
  // ids [batch, length] to logits [batch, length, vocabulary].
  Tensor forward(const Tensor& ids);
};

}  // namespace chorale::models
