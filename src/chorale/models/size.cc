#include "chorale/models/size.h"

namespace chorale::models {
namespace {

double real(int64_t value) { return static_cast<double>(value); }

}  // namespace

ModelSize size_of(const Gpt2Config& config) {
  const double width = real(config.n_embd), layers = real(config.n_layer);
  const double norm = 2 * width;
  const double attention = width * 3 * width + 3 * width + width * width + width;
  const double mlp = width * 4 * width + 4 * width + 4 * width * width + width;
  return {.parameters = (real(config.vocab_size) + real(config.n_positions)) * width +
                        layers * (2 * norm + attention + mlp) + norm,
          .tensors = 4 + 12 * layers};
}

ModelSize size_of(const BertConfig& config) {
  const double width = real(config.hidden_size), inner = real(config.intermediate_size);
  const double layers = real(config.num_hidden_layers), words = real(config.vocab_size);
  const double norm = 2 * width, square = width * (width + 1);
  const double embeddings =
      (words + real(config.max_position_embeddings) + real(config.type_vocab_size)) * width + norm;
  const double layer = 4 * square + norm + width * inner + inner + inner * width + width + norm;
  const double head = square + norm + words;
  return {.parameters = embeddings + layers * layer + head, .tensors = 10 + 16 * layers};
}

double bytes_of(const ModelSize& size, double copies) {
  constexpr double kBytesOfTensor = 1024;  // about: the handle, its storage, and its place in the graph
  return copies * (size.parameters * 4 + size.tensors * kBytesOfTensor);
}

}  // namespace chorale::models
