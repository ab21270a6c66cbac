#include "chorale/models/encoder.h"

#include "chorale/api/api.h"

namespace chorale::models {

EncoderBlock::EncoderBlock(int64_t width, int64_t head_count)
    : ln1(width),
      qkv(width, 3 * width),
      out(width, width),
      ln2(width),
      up(width, 4 * width),
      down(4 * width, width),
      heads(head_count) {
  CHORALE_CHECK(heads > 0 && width % heads == 0, "[Encoder] a width of ", width, " cannot be cut into ", heads,
                " heads");
}

Tensor EncoderBlock::forward(const Tensor& x) {
  const int64_t B = x.size(0), T = x.size(1), D = x.size(2);  // batch, length, width
  const Tensor parts = permute(view(qkv(ln1(x)), {B, T, 3, heads, D / heads}), {2, 0, 3, 1, 4});
  const Tensor mixed = scaled_dot_product_attention(select(parts, 0, 0), select(parts, 0, 1), select(parts, 0, 2));
  const Tensor y = x + out(reshape(transpose(mixed, 1, 2), {B, T, D}));
  return y + down(gelu(up(ln2(y))));
}

Encoder::Encoder(const EncoderConfig& config)
    : token(config.vocabulary, config.width),
      position(config.length, config.width),
      ln(config.width),
      head(config.width, config.vocabulary) {
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config.width, config.heads);
}

Tensor Encoder::forward(const Tensor& ids) {
  CHORALE_CHECK(ids.dims() == 2 && ids.size(1) <= position.weight.size(0),
                "[Encoder] expected ids [batch, length] with a length of at most ", position.weight.size(0),
                ", found shape ", ids.sizes());
  Tensor x = token(ids) + position(arange(ids.size(1), DType::kI64, ids.device()));
  for (EncoderBlock& block : blocks) x = block(x);
  return head(ln(x));
}

}  // namespace chorale::models
